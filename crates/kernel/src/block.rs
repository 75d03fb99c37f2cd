//! What a waiting process is to become, as one block of bytes: laid out by who gives the order, so that the process itself has nothing
//! to do but to add where the block lies.

use std::io;

/// Arguments and environment together, with a pointer for each; the kernel's own limit is of this order.
pub const MAX_IMAGE_BYTES: usize = 4 * 1024 * 1024;
/// What a string takes beside its bytes: a pointer and a NUL, as the kernel counts it.
pub const STRING_BYTES: usize = size_of::<usize>() + 1;
/// The kernel's own limit of a name in a directory.
const MAX_NAME_BYTES: usize = 255;
/// Where programs are looked for when the environment doesn't say.
const DEFAULT_PATH: &[u8] = b"/usr/bin:/bin";
/// A number in the block. The first ones are the head, then come the pointers, which are places in the block until it lies somewhere.
const WORD: usize = size_of::<u64>();
const HEAD_WORDS: usize = 7;

/// What to run. None of the strings may have a NUL.
pub struct Program {
    /// What tells the descendants of one program from those of another; see [`crate::mark_of`].
    pub mark: u64,
    /// Standard input becomes the program's own terminal.
    pub is_terminal: bool,
    pub cwd: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub env: Vec<Vec<u8>>,
}

impl Program {
    pub fn to_block(&self) -> io::Result<Vec<u8>> {
        let strings = || std::iter::once(&self.cwd).chain(&self.argv).chain(&self.env);
        let bytes: usize = strings().map(|s| s.len() + STRING_BYTES).sum();
        if bytes > MAX_IMAGE_BYTES {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        if strings().any(|s| s.contains(&0)) {
            let message = "a NUL byte can't be in a command, its directory or its environment";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let Some(name) = self.argv.first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is nothing to run"));
        };
        let is_path = name.contains(&b'/');
        if !is_path && name.len() > MAX_NAME_BYTES {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }

        let argv = HEAD_WORDS;
        let env = argv + self.argv.len() + 1;
        let start = (env + self.env.len() + 1) * WORD;
        let mut block = vec![0; start];
        block.reserve(bytes);
        let mut add = |string: &[u8]| {
            let place = block.len();
            block.extend_from_slice(string);
            block.push(0);
            place
        };
        let cwd = add(&self.cwd);
        let arguments: Vec<usize> = self.argv.iter().map(|s| add(s)).collect();
        let variables: Vec<usize> = self.env.iter().map(|s| add(s)).collect();
        let path = match self.env.iter().position(|variable| variable.starts_with(b"PATH=")) {
            _ if is_path => 0,
            Some(at) => variables[at] + b"PATH=".len(),
            None => add(DEFAULT_PATH),
        };
        let head = [self.mark as usize, self.is_terminal.into(), cwd, path, argv, env, start];
        for (at, word) in head.into_iter().chain(arguments).chain([0]).chain(variables).enumerate() {
            block[at * WORD..][..WORD].copy_from_slice(&(word as u64).to_ne_bytes());
        }
        Ok(block)
    }
}

/// A block where it lies, ready to be run.
pub struct Laid<'a> {
    pub mark: u64,
    pub is_terminal: bool,
    cwd: &'a [u8],
    /// The first argument, and where to look for it unless it says so itself.
    name: &'a [u8],
    path: Option<&'a [u8]>,
    argv: *const u64,
    env: *const u64,
}

impl<'a> Laid<'a> {
    /// Makes the places in the block pointers. Neither allocates nor panics, whatever the bytes are; `None` for what is no block.
    pub fn new(block: &'a mut [u64], bytes: usize) -> Option<Self> {
        let base = block.as_mut_ptr() as u64;
        let head: [u64; HEAD_WORDS] = block.get(..HEAD_WORDS)?.try_into().ok()?;
        let [mark, is_terminal, cwd, path, argv, env, start] = head;
        let words = usize::try_from(start).ok()? / WORD;
        let (argv, env) = (usize::try_from(argv).ok()?, usize::try_from(env).ok()?);
        let name = *block.get(argv)?;
        // Each list ends before the strings do, with a null.
        let is_list = argv >= HEAD_WORDS && env > argv && words > env && *block.get(env - 1)? == 0 && *block.get(words - 1)? == 0;
        // The last byte ends whatever string is the last, so that all do.
        let bytes = usize::min(bytes, size_of_val(block));
        if !is_list || start as usize >= bytes {
            return None;
        }
        for word in block.get_mut(argv..words)? {
            match *word {
                0 => {}
                place if (place as usize) < bytes => *word += base,
                _ => return None,
            }
        }
        let block: &'a [u64] = block;
        let (argv, env) = (block.get(argv..)?.as_ptr(), block.get(env..)?.as_ptr());
        // SAFETY: the same memory, seen as bytes.
        let text = unsafe { std::slice::from_raw_parts(block.as_ptr().cast::<u8>(), bytes) };
        if *text.last()? != 0 {
            return None;
        }
        let string = |place: u64| {
            let rest = text.get(usize::try_from(place).ok()?..)?;
            rest.get(..=rest.iter().position(|byte| *byte == 0)?)
        };
        let path = if path == 0 { None } else { Some(string(path)?) };
        Some(Self { mark, is_terminal: is_terminal != 0, cwd: string(cwd)?, name: string(name)?, path, argv, env })
    }

    /// With its NUL, as all of these.
    pub fn cwd(&self) -> &[u8] {
        self.cwd
    }

    pub fn name(&self) -> &[u8] {
        self.name
    }

    pub fn path(&self) -> Option<&[u8]> {
        self.path
    }

    pub fn pointers(&self) -> (*const u64, *const u64) {
        (self.argv, self.env)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use proptest::prelude::*;

    use super::*;

    fn program(argv: &[&[u8]], env: &[&[u8]]) -> Program {
        let owned = |list: &[&[u8]]| list.iter().map(|s| s.to_vec()).collect();
        Program { mark: 7, is_terminal: true, cwd: b"/w".to_vec(), argv: owned(argv), env: owned(env) }
    }

    /// As it lies in memory, and its length in bytes.
    fn lie(bytes: &[u8]) -> (Vec<u64>, usize) {
        let word = |chunk: &[u8]| u64::from_ne_bytes(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(0)));
        (bytes.chunks(WORD).map(word).collect(), bytes.len())
    }

    /// The strings of a list as execve reads them.
    fn strings(list: *const u64) -> Vec<Vec<u8>> {
        // SAFETY: lists of a block that was accepted end with a null, and each string with a NUL.
        let at = |i| unsafe { (*list.add(i) != 0).then(|| CStr::from_ptr(*list.add(i) as *const _).to_bytes().to_vec()) };
        (0..).map_while(at).collect()
    }

    #[test]
    fn a_program_comes_back_as_it_was() {
        let (argv, env): ([&[u8]; 3], [&[u8]; 3]) = ([b"sh", b"", &[0xff]], [b"A=\n", b"PATH=/a:/b", b""]);
        let (mut words, bytes) = lie(&program(&argv, &env).to_block().unwrap());
        let laid = Laid::new(&mut words, bytes).unwrap();
        assert_eq!((laid.mark, laid.is_terminal), (7, true));
        assert_eq!((laid.cwd(), laid.name(), laid.path()), (&b"/w\0"[..], &b"sh\0"[..], Some(&b"/a:/b\0"[..])));
        let (a, e) = laid.pointers();
        assert_eq!((strings(a), strings(e)), (argv.map(<[u8]>::to_vec).to_vec(), env.map(<[u8]>::to_vec).to_vec()));
    }

    #[test]
    fn a_name_is_looked_for_and_a_path_is_not() {
        let path = |argv: &[&[u8]], env: &[&[u8]]| {
            let (mut words, bytes) = lie(&program(argv, env).to_block().unwrap());
            Laid::new(&mut words, bytes).unwrap().path().map(<[u8]>::to_vec)
        };
        assert_eq!(path(&[b"./sh"], &[b"PATH=/a"]), None);
        assert_eq!(path(&[b"sh"], &[]).unwrap(), [DEFAULT_PATH, b"\0"].concat());
        assert_eq!(path(&[b"sh", b"PATH=/arguments"], &[b"A=b"]).unwrap(), [DEFAULT_PATH, b"\0"].concat());
        let long = [b'x'; MAX_NAME_BYTES + 1];
        assert_eq!(program(&[&long], &[]).to_block().unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
    }

    #[test]
    fn what_can_not_be_run_is_refused() {
        let empty = vec![&b""[..]; MAX_IMAGE_BYTES / STRING_BYTES + 1];
        assert_eq!(program(&empty, &[]).to_block().unwrap_err().raw_os_error(), Some(libc::E2BIG));
        assert!(program(&empty[..empty.len() - 100], &[]).to_block().is_ok(), "strings count with what points to them");
        for bad in [program(&[], &[]), program(&[b"a\0b"], &[]), program(&[b"a"], &[b"A=\0"])] {
            assert_eq!(bad.to_block().unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    proptest! {
        /// Whatever a block was changed to, what is accepted can be read.
        #[test]
        fn no_block_leads_out_of_itself(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), cut in any::<prop::sample::Index>()) {
            let mut block = program(&[b"sh", b"-c", b"true"], &[b"A=b", b"PATH=/a"]).to_block().unwrap();
            for (at, byte) in changes {
                let at = at.index(block.len());
                block[at] = byte;
            }
            block.truncate(cut.index(block.len() + 1));
            let (mut words, bytes) = lie(&block);
            let span = words.as_ptr_range();
            if let Some(laid) = Laid::new(&mut words, bytes) {
                for list in [laid.pointers().0, laid.pointers().1] {
                    prop_assert!(span.contains(&list));
                    strings(list);
                }
            }
        }
    }
}
