//! Tokens: any text is judged without a panic, and no change to a good token makes another good one.

use std::sync::OnceLock;

use cobox_protocol::{Timestamp, control::Alg};
use cobox_token::{Keyset, MasterKey, key_id};

use crate::{NOW, choose, claims, sandbox};

struct Minted {
    keys: Keyset,
    token: String,
}

/// One sandbox with a key of each algorithm would have two key ids; here each has a keyset of its own.
fn minted(alg: Alg) -> &'static Minted {
    static EDDSA: OnceLock<Minted> = OnceLock::new();
    static HS256: OnceLock<Minted> = OnceLock::new();
    let cell = if alg == Alg::EdDsa { &EDDSA } else { &HS256 };
    cell.get_or_init(|| {
        let key = MasterKey::from_bytes([7; 32]).derive(&sandbox(), 1, alg);
        assert_eq!(key.kid(), key_id(&sandbox(), 1));
        let keys = Keyset::new("cobox", &sandbox(), &[key.verify_spec()]).expect("our own key can be read");
        Minted { keys, token: key.mint(&claims()).expose().to_owned() }
    })
}

/// The first byte says what the rest is: a token, or changes to a good one of three bytes each.
pub fn run(data: &[u8]) {
    let ([choice], rest) = choose::<1>(data);
    let minted = minted(if choice & 1 == 0 { Alg::EdDsa } else { Alg::Hs256 });
    let mut token = minted.token.clone().into_bytes();
    if choice & 2 == 0 {
        rest.chunks_exact(3).for_each(|change| apply(change, &mut token));
    } else {
        token = rest.to_vec();
    }
    let Ok(token) = std::str::from_utf8(&token) else { return };
    let verdict = minted.keys.verify(token, Timestamp::from_unix(NOW));
    assert_eq!(verdict.is_ok(), token == minted.token, "{verdict:?} for {token}");
}

/// Where, and what: a byte replaced, put in or taken out.
fn apply(change: &[u8], token: &mut Vec<u8>) {
    let at = usize::from(u16::from_le_bytes([change[0], change[1]]));
    let (at, what) = (at % (token.len() + 1), at / 2048 % 3);
    match what {
        1 => token.insert(at, change[2]),
        2 if at < token.len() => drop(token.remove(at)),
        _ => {
            if let Some(byte) = token.get_mut(at) {
                *byte = change[2];
            }
        }
    }
}
