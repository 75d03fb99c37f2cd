//! Connections whose client has not shown a good credential yet: bounded in total and for each address. At a limit the oldest of them is
//! closed, never the new one refused, so that a client with a good key always has the moment it needs to show it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

/// Where a connection comes from; of IPv6 the network, which is what one customer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientAddress(IpAddr);

impl From<IpAddr> for ClientAddress {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
            v4 => v4,
        })
    }
}

impl Default for ClientAddress {
    /// The client's address is unknown.
    fn default() -> Self {
        Self(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }
}

/// The unauthenticated connections of one listener, of one sandbox, or of all sandboxes.
pub struct UnauthenticatedConnections {
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
    by_address: HashMap<ClientAddress, BTreeSet<u64>>,
}

struct Entry {
    address: ClientAddress,
    close: CancellationToken,
}

impl UnauthenticatedConnections {
    pub fn new(max_total: usize, max_per_address: Option<usize>) -> Arc<Self> {
        Arc::new(Self { max_total, max_per_address, table: Mutex::default() })
    }

    /// Takes in a new connection, and closes older ones that it leaves no room for.
    pub fn register(self: &Arc<Self>, address: ClientAddress) -> UnauthenticatedConnection {
        let close = CancellationToken::new();
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.open.insert(number, Entry { address, close: close.clone() });
        table.by_address.entry(address).or_default().insert(number);
        let of_address = table.by_address.get(&address).map_or(0, BTreeSet::len);
        if self.max_per_address.is_some_and(|max| of_address > max) {
            table.close_oldest_of(address);
        }
        if table.open.len() > self.max_total {
            table.close_oldest_of_busiest();
        }
        UnauthenticatedConnection { unauthenticated: self.clone(), number, close }
    }

    /// Closes one connection, if there is any.
    pub fn make_room(&self) {
        self.table().close_oldest_of_busiest();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change leaves both maps consistent before anything in it can panic.
        self.table.lock()
    }
}

impl Table {
    /// Closes connections of the address that has the most, so that one address can't displace others.
    fn close_oldest_of_busiest(&mut self) {
        let busiest = self.by_address.iter().max_by_key(|(_, numbers)| numbers.len()).map(|(address, _)| *address);
        if let Some(busiest) = busiest {
            self.close_oldest_of(busiest);
        }
    }

    fn close_oldest_of(&mut self, address: ClientAddress) {
        let oldest = self.by_address.get(&address).and_then(|numbers| numbers.first().copied());
        if let Some(entry) = oldest.and_then(|number| self.remove(number)) {
            entry.close.cancel();
        }
    }

    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.open.remove(&number)?;
        if let Some(numbers) = self.by_address.get_mut(&entry.address) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_address.remove(&entry.address);
            }
        }
        Some(entry)
    }
}

/// One connection, counted until its client is authenticated or it ends.
pub struct UnauthenticatedConnection {
    unauthenticated: Arc<UnauthenticatedConnections>,
    number: u64,
    close: CancellationToken,
}

impl UnauthenticatedConnection {
    /// Stops counting the connection: from now on nothing here closes it.
    pub fn leave(&self) {
        self.unauthenticated.table().remove(self.number);
    }

    /// Resolves when the connection has to make room.
    pub fn must_close(&self) -> impl Future<Output = ()> + Send + use<> {
        self.close.clone().cancelled_owned()
    }
}

impl Drop for UnauthenticatedConnection {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> ClientAddress {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)).into()
    }

    fn must_close(entered: &UnauthenticatedConnection) -> bool {
        entered.close.is_cancelled()
    }

    #[test]
    fn the_oldest_of_an_address_makes_room_for_its_newest() {
        let all = UnauthenticatedConnections::new(100, Some(2));
        let (first, second, other) = (all.register(address(1)), all.register(address(1)), all.register(address(2)));
        let third = all.register(address(1));
        assert_eq!([&first, &second, &third, &other].map(must_close), [true, false, false, false]);
        drop(second);
        let fourth = all.register(address(1));
        assert_eq!([&third, &fourth].map(must_close), [false, false]);
    }

    #[test]
    fn at_the_limit_of_all_the_busiest_address_makes_room() {
        let all = UnauthenticatedConnections::new(4, None);
        let few = all.register(address(1));
        let many: Vec<UnauthenticatedConnection> = (0..4).map(|_| all.register(address(2))).collect();
        assert!(!must_close(&few));
        assert_eq!(many.iter().map(must_close).collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn one_network_of_ipv6_is_one_source_and_an_ipv4_address_is_itself() {
        let source = |text: &str| ClientAddress::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    }

    #[test]
    fn an_authenticated_connection_is_neither_counted_nor_closed() {
        let all = UnauthenticatedConnections::new(2, Some(2));
        let known: Vec<UnauthenticatedConnection> =
            (0..10).map(|_| all.register(address(1))).inspect(UnauthenticatedConnection::leave).collect();
        let _new = [all.register(address(1)), all.register(address(1)), all.register(address(1))];
        assert!(!known.iter().any(must_close));
        assert_eq!(all.table().open.len(), 2);
        drop(known);
        assert_eq!(all.table().open.len(), 2);
    }
}
