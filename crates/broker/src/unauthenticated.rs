//! Connections whose client has not shown a good credential yet: bounded in total and for each address. At a limit the oldest of them is
//! closed, never the new one refused, so that a client with a good key always has the moment it needs to show it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use crate::domain::rates::Source;

/// The unauthenticated connections of one listener.
pub struct Unauthenticated {
    max_total: usize,
    /// `None`: not limited.
    max_per_address: Option<usize>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// By number, so oldest first.
    open: BTreeMap<u64, Entry>,
    by_source: HashMap<Source, BTreeSet<u64>>,
}

struct Entry {
    source: Source,
    close: CancellationToken,
}

impl Unauthenticated {
    pub fn new(max_total: usize, max_per_address: Option<usize>) -> Arc<Self> {
        Arc::new(Self { max_total, max_per_address, table: Mutex::default() })
    }

    /// Takes in a new connection, and closes older ones that it leaves no room for.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Entered {
        let (source, close) = (Source::from(address), CancellationToken::new());
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.open.insert(number, Entry { source, close: close.clone() });
        table.by_source.entry(source).or_default().insert(number);
        let of_source = table.by_source.get(&source).map_or(0, BTreeSet::len);
        if self.max_per_address.is_some_and(|max| of_source > max) {
            table.close_oldest_of(source);
        }
        if table.open.len() > self.max_total {
            // One address that has many doesn't push out the few of another.
            let busiest = table.by_source.iter().max_by_key(|(_, numbers)| numbers.len()).map(|(source, _)| *source);
            if let Some(busiest) = busiest {
                table.close_oldest_of(busiest);
            }
        }
        Entered { unauthenticated: self.clone(), number, close }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change leaves both maps consistent before anything in it can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn close_oldest_of(&mut self, source: Source) {
        let oldest = self.by_source.get(&source).and_then(|numbers| numbers.first().copied());
        if let Some(entry) = oldest.and_then(|number| self.remove(number)) {
            entry.close.cancel();
        }
    }

    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.open.remove(&number)?;
        if let Some(numbers) = self.by_source.get_mut(&entry.source) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_source.remove(&entry.source);
            }
        }
        Some(entry)
    }
}

/// One connection, counted until its client is authenticated or it ends.
pub struct Entered {
    unauthenticated: Arc<Unauthenticated>,
    number: u64,
    close: CancellationToken,
}

impl Entered {
    /// Stops counting the connection: from now on nothing here closes it.
    pub fn authenticated(&self) {
        self.unauthenticated.table().remove(self.number);
    }

    /// Resolves when the connection has to make room.
    pub async fn must_close(&self) {
        self.close.cancelled().await;
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.authenticated();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    fn must_close(entered: &Entered) -> bool {
        entered.close.is_cancelled()
    }

    #[test]
    fn the_oldest_of_an_address_makes_room_for_its_newest() {
        let all = Unauthenticated::new(100, Some(2));
        let (first, second, other) = (all.enter(address(1)), all.enter(address(1)), all.enter(address(2)));
        let third = all.enter(address(1));
        assert_eq!([&first, &second, &third, &other].map(must_close), [true, false, false, false]);
        drop(second);
        let fourth = all.enter(address(1));
        assert_eq!([&third, &fourth].map(must_close), [false, false]);
    }

    #[test]
    fn at_the_limit_of_all_the_busiest_address_makes_room() {
        let all = Unauthenticated::new(4, None);
        let few = all.enter(address(1));
        let many: Vec<Entered> = (0..4).map(|_| all.enter(address(2))).collect();
        assert!(!must_close(&few));
        assert_eq!(many.iter().map(must_close).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn an_authenticated_connection_is_neither_counted_nor_closed() {
        let all = Unauthenticated::new(2, Some(2));
        let known: Vec<Entered> = (0..10).map(|_| all.enter(address(1))).inspect(Entered::authenticated).collect();
        let _new = [all.enter(address(1)), all.enter(address(1)), all.enter(address(1))];
        assert!(!known.iter().any(must_close));
        assert_eq!(all.table().open.len(), 2);
        drop(known);
        assert_eq!(all.table().open.len(), 2);
    }
}
