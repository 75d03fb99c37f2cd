//! Tokens: any text is verified without a panic, and no modified token is accepted.

use std::sync::OnceLock;

use cobox_protocol::{Timestamp, control::Alg};
use cobox_token::{Keyset, MasterKey, key_id};

use crate::{NOW, choose, claims, sandbox};

struct Minted {
    keys: Keyset,
    token: String,
}

/// Each algorithm has its own keyset, because one sandbox with a key of each would have two keys with the same id.
fn minted(alg: Alg) -> &'static Minted {
    static EDDSA: OnceLock<Minted> = OnceLock::new();
    static HS256: OnceLock<Minted> = OnceLock::new();
    let cell = if alg == Alg::EdDsa { &EDDSA } else { &HS256 };
    cell.get_or_init(|| {
        let key = MasterKey::from_bytes([7; 32]).derive(&sandbox(), 1, alg);
        assert_eq!(key.kid(), key_id(&sandbox(), 1));
        let keys = Keyset::new("cobox", &sandbox(), &[key.verify_spec()]).expect("a derived key is valid");
        Minted { keys, token: key.mint(&claims()).expose().to_owned() }
    })
}

/// The first byte decides what the rest is: a token, or modifications of a valid one, three bytes each.
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

/// One modification: a byte replaced, inserted or removed at an offset.
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
