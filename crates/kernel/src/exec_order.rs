//! The order for a standby process: what to execute, encoded as one block of bytes. The sender lays it out completely,
//! so that the standby process only has to add the block's address to each pointer.

use std::io;

/// Maximum total size of arguments and environment, including a pointer for each string. The kernel's own limit has the
/// same order of magnitude.
pub const MAX_EXEC_ARGS_BYTES: usize = 4 * 1024 * 1024;
/// Size that each string needs in addition to its bytes: a pointer and a NUL, as the kernel counts it.
pub const STRING_OVERHEAD_BYTES: usize = size_of::<usize>() + 1;
/// The kernel's limit on a file name.
const MAX_NAME_BYTES: usize = 255;
/// Search path for programs if the environment has no `PATH`.
const DEFAULT_PATH: &[u8] = b"/usr/bin:/bin";
/// Size of a number in the block. The block begins with a header, followed by the pointers, which are offsets into the
/// block until it is at its final address.
const WORD: usize = size_of::<u64>();
const HEADER_WORDS: usize = 7;

/// A program to execute. None of its strings may contain a NUL.
pub struct Program {
    /// Distinguishes the descendants of one program from those of another; see [`crate::mark_of`].
    pub mark: u64,
    /// Whether standard input becomes the program's controlling terminal.
    pub is_terminal: bool,
    pub cwd: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    /// Strings of the form `NAME=value`.
    pub env: Vec<Vec<u8>>,
}

impl Program {
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let strings = || std::iter::once(&self.cwd).chain(&self.argv).chain(&self.env);
        let bytes: usize = strings().map(|s| s.len() + STRING_OVERHEAD_BYTES).sum();
        if bytes > MAX_EXEC_ARGS_BYTES {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        if strings().any(|s| s.contains(&0)) {
            let message = "a command, its directory and its environment must not contain NUL bytes";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let Some(name) = self.argv.first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the command is empty"));
        };
        let is_path = name.contains(&b'/');
        if !is_path && name.len() > MAX_NAME_BYTES {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }

        let argv = HEADER_WORDS;
        let env = argv + self.argv.len() + 1;
        let start = (env + self.env.len() + 1) * WORD;
        let mut block = vec![0; start];
        block.reserve(bytes);
        let mut add = |string: &[u8]| {
            let offset = block.len();
            block.extend_from_slice(string);
            block.push(0);
            offset
        };
        let cwd = add(&self.cwd);
        let arguments: Vec<usize> = self.argv.iter().map(|s| add(s)).collect();
        let variables: Vec<usize> = self.env.iter().map(|s| add(s)).collect();
        let path = match self.env.iter().position(|variable| variable.starts_with(b"PATH=")) {
            _ if is_path => 0,
            Some(at) => variables[at] + b"PATH=".len(),
            None => add(DEFAULT_PATH),
        };
        let header = [self.mark as usize, self.is_terminal.into(), cwd, path, argv, env, start];
        for (at, word) in header.into_iter().chain(arguments).chain([0]).chain(variables).enumerate() {
            block[at * WORD..][..WORD].copy_from_slice(&(word as u64).to_ne_bytes());
        }
        Ok(block)
    }
}

/// An order at its final address, ready to be executed.
pub struct EncodedOrder<'a> {
    pub mark: u64,
    pub is_terminal: bool,
    cwd: &'a [u8],
    /// The first argument, and the search path for it; `None` if the argument is itself a path.
    name: &'a [u8],
    path: Option<&'a [u8]>,
    argv: *const u64,
    env: *const u64,
}

impl<'a> EncodedOrder<'a> {
    /// Turns the offsets in the block into pointers. Never allocates or panics, for any bytes; `None` if they are not a
    /// valid block.
    pub fn new(block: &'a mut [u64], bytes: usize) -> Option<Self> {
        let base = block.as_mut_ptr() as u64;
        let header: [u64; HEADER_WORDS] = block.get(..HEADER_WORDS)?.try_into().ok()?;
        let [mark, is_terminal, cwd, path, argv, env, start] = header;
        let words = usize::try_from(start).ok()? / WORD;
        let (argv, env) = (usize::try_from(argv).ok()?, usize::try_from(env).ok()?);
        let name = *block.get(argv)?;
        // Each list ends with a null before the strings begin.
        let is_list = argv >= HEADER_WORDS && env > argv && words > env && *block.get(env - 1)? == 0 && *block.get(words - 1)? == 0;
        // If the last byte is a NUL, every string in the block is terminated.
        let bytes = usize::min(bytes, size_of_val(block));
        if !is_list || start as usize >= bytes {
            return None;
        }
        for word in block.get_mut(argv..words)? {
            match *word {
                0 => {}
                offset if (offset as usize) < bytes => *word += base,
                _ => return None,
            }
        }
        let block: &'a [u64] = block;
        let (argv, env) = (block.get(argv..)?.as_ptr(), block.get(env..)?.as_ptr());
        // SAFETY: the same memory, viewed as bytes.
        let text = unsafe { std::slice::from_raw_parts(block.as_ptr().cast::<u8>(), bytes) };
        if *text.last()? != 0 {
            return None;
        }
        let string = |offset: u64| {
            let rest = text.get(usize::try_from(offset).ok()?..)?;
            rest.get(..=rest.iter().position(|byte| *byte == 0)?)
        };
        let path = if path == 0 { None } else { Some(string(path)?) };
        Some(Self { mark, is_terminal: is_terminal != 0, cwd: string(cwd)?, name: string(name)?, path, argv, env })
    }

    /// The working directory. Like all strings here it includes its NUL.
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

    /// Copies a block to aligned memory. Returns that and the block's length in bytes.
    fn load(bytes: &[u8]) -> (Vec<u64>, usize) {
        let word = |chunk: &[u8]| u64::from_ne_bytes(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(0)));
        (bytes.chunks(WORD).map(word).collect(), bytes.len())
    }

    /// The strings of a list, as execve reads them.
    fn strings(list: *const u64) -> Vec<Vec<u8>> {
        // SAFETY: in an accepted block each list ends with a null and each string with a NUL.
        let at = |i| unsafe { (*list.add(i) != 0).then(|| CStr::from_ptr(*list.add(i) as *const _).to_bytes().to_vec()) };
        (0..).map_while(at).collect()
    }

    #[test]
    fn a_decoded_order_equals_the_program() {
        let (argv, env): ([&[u8]; 3], [&[u8]; 3]) = ([b"sh", b"", &[0xff]], [b"A=\n", b"PATH=/a:/b", b""]);
        let (mut words, bytes) = load(&program(&argv, &env).encode().unwrap());
        let order = EncodedOrder::new(&mut words, bytes).unwrap();
        assert_eq!((order.mark, order.is_terminal), (7, true));
        assert_eq!((order.cwd(), order.name(), order.path()), (&b"/w\0"[..], &b"sh\0"[..], Some(&b"/a:/b\0"[..])));
        let (a, e) = order.pointers();
        assert_eq!((strings(a), strings(e)), (argv.map(<[u8]>::to_vec).to_vec(), env.map(<[u8]>::to_vec).to_vec()));
    }

    #[test]
    fn a_name_is_searched_in_path_and_a_path_is_not() {
        let path = |argv: &[&[u8]], env: &[&[u8]]| {
            let (mut words, bytes) = load(&program(argv, env).encode().unwrap());
            EncodedOrder::new(&mut words, bytes).unwrap().path().map(<[u8]>::to_vec)
        };
        assert_eq!(path(&[b"./sh"], &[b"PATH=/a"]), None);
        assert_eq!(path(&[b"sh"], &[]).unwrap(), [DEFAULT_PATH, b"\0"].concat());
        assert_eq!(path(&[b"sh", b"PATH=/arguments"], &[b"A=b"]).unwrap(), [DEFAULT_PATH, b"\0"].concat());
        let long = [b'x'; MAX_NAME_BYTES + 1];
        assert_eq!(program(&[&long], &[]).encode().unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
    }

    #[test]
    fn invalid_programs_are_rejected() {
        let empty = vec![&b""[..]; MAX_EXEC_ARGS_BYTES / STRING_OVERHEAD_BYTES + 1];
        assert_eq!(program(&empty, &[]).encode().unwrap_err().raw_os_error(), Some(libc::E2BIG));
        assert!(program(&empty[..empty.len() - 100], &[]).encode().is_ok(), "strings count with their pointers");
        for bad in [program(&[], &[]), program(&[b"a\0b"], &[]), program(&[b"a"], &[b"A=\0"])] {
            assert_eq!(bad.encode().unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    proptest! {
        /// An accepted block can be read safely, no matter how it was changed.
        #[test]
        fn no_block_has_pointers_out_of_bounds(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), cut in any::<prop::sample::Index>()) {
            let mut block = program(&[b"sh", b"-c", b"true"], &[b"A=b", b"PATH=/a"]).encode().unwrap();
            for (at, byte) in changes {
                let at = at.index(block.len());
                block[at] = byte;
            }
            block.truncate(cut.index(block.len() + 1));
            let (mut words, bytes) = load(&block);
            let span = words.as_ptr_range();
            if let Some(order) = EncodedOrder::new(&mut words, bytes) {
                for list in [order.pointers().0, order.pointers().1] {
                    prop_assert!(span.contains(&list));
                    strings(list);
                }
            }
        }
    }
}
