//! A user at a terminal: a real pty that runs a program, a terminal emulator for its output, and keyboard input.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

use crate::eventually;

/// Maximum output that is kept, in bytes.
const MAX_OUTPUT_BYTES: usize = 4 * 1024 * 1024;
/// Output that a failed test prints, in bytes.
const FAILURE_OUTPUT_BYTES: usize = 600;
/// Maximum wait for the remaining output of an ended program while another process keeps its terminal open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

pub struct TestTerminal {
    name: &'static str,
    keyboard: File,
    child: Child,
    screen: Arc<Mutex<vt100::Parser<Answers>>>,
    printed: Arc<Mutex<Vec<u8>>>,
    frozen: Arc<(Mutex<bool>, Condvar)>,
    /// Reads the output until no process has the terminal open.
    reader: JoinHandle<()>,
}

/// State of the screen: text with colors, cursor and its visibility, alternate screen, and input modes for keys, mouse and paste.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScreenState {
    pub text: String,
    pub formatted: Vec<u8>,
    pub cursor: (u16, u16),
    pub hides_cursor: bool,
    pub is_alternate: bool,
    pub input_modes: Vec<u8>,
}

/// Replies of the terminal to status queries.
#[derive(Default)]
struct Answers(Vec<u8>);

impl vt100::Callbacks for Answers {
    fn unhandled_csi(&mut self, screen: &mut vt100::Screen, first: Option<u8>, _: Option<u8>, params: &[&[u16]], last: char) {
        match (first, params, last) {
            (None, [[6]], 'n') => {
                let (row, col) = screen.cursor_position();
                self.0.extend_from_slice(format!("\x1b[{};{}R", row + 1, col + 1).as_bytes());
            }
            (None, [[5]], 'n') => self.0.extend_from_slice(b"\x1b[0n"),
            (None, [[0]] | [], 'c') => self.0.extend_from_slice(b"\x1b[?1;2c"),
            _ => {}
        }
    }
}

impl TestTerminal {
    /// Starts the program with this terminal as its controlling terminal.
    pub fn start(name: &'static str, program: &Command, (cols, rows): (u16, u16)) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pty");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("the pty's other end can be unlocked");
        tcsetwinsize(&master, winsize(cols, rows)).expect("a size");
        let path = ptsname(&master, Vec::new()).expect("the pty has a name").into_string().expect("UTF-8");
        let slave = || Stdio::from(File::options().read(true).write(true).open(&path).expect("the pty's other end can be opened"));
        // The terminal must be the program's controlling terminal, or the program receives no SIGWINCH.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program.get_program()).args(program.get_args()).env_clear().env("TERM", "xterm-256color");
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        if let Some(dir) = program.get_current_dir() {
            command.current_dir(dir);
        }
        let child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().expect("the program can be started");
        let screen = Arc::new(Mutex::new(vt100::Parser::new_with_callbacks(rows, cols, 0, Answers::default())));
        let keyboard = File::from(master);
        let mut output = keyboard.try_clone().expect("the pty can be duplicated");
        let (seen, printed, frozen) = (screen.clone(), Arc::new(Mutex::new(Vec::new())), Arc::new((Mutex::new(false), Condvar::new())));
        let (remembered, is_frozen) = (printed.clone(), frozen.clone());
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 16 * 1024];
            loop {
                let (held, thaws) = &*is_frozen;
                drop(
                    thaws
                        .wait_while(held.lock().expect("no thread panics while holding it"), |held| *held)
                        .expect("no thread panics while holding it"),
                );
                // Ends when the program and all its descendants have closed the terminal.
                let Ok(n @ 1..) = output.read(&mut buffer) else { return };
                let answers = {
                    let mut screen = seen.lock().expect("no thread panics while holding it");
                    screen.process(&buffer[..n]);
                    std::mem::take(&mut screen.callbacks_mut().0)
                };
                let mut all = remembered.lock().expect("no thread panics while holding it");
                all.extend_from_slice(&buffer[..n]);
                let excess = all.len().saturating_sub(MAX_OUTPUT_BYTES);
                all.drain(..excess);
                drop(all);
                // Errors are ignored, because an ended program needs no reply.
                let _ = output.write_all(&answers);
            }
        });
        Self { name, keyboard, child, screen, printed, frozen, reader }
    }

    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal accepts input");
    }

    /// Pastes text, in bracketed paste mode if the program has enabled it.
    pub fn paste(&mut self, text: &str) {
        let marks = if self.look(vt100::Screen::bracketed_paste) { ["\x1b[200~", "\x1b[201~"] } else { ["", ""] };
        self.press(&[marks[0], text, marks[1]].concat());
    }

    pub fn resize(&mut self, cols: u16, rows: u16) {
        self.screen.lock().expect("no thread panics while holding it").screen_mut().set_size(rows, cols);
        tcsetwinsize(&self.keyboard, winsize(cols, rows)).expect("a size");
    }

    /// Stops or resumes reading the program's output.
    pub fn set_frozen(&self, is_frozen: bool) {
        *self.frozen.0.lock().expect("no thread panics while holding it") = is_frozen;
        self.frozen.1.notify_all();
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid")).expect("a pid");
        kill_process(pid, signal).expect("the program can be signaled");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the terminal is in the mode that a shell expects: line input with echo.
    pub fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.keyboard).expect("the terminal's modes can be read").local_modes;
        modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
    }

    /// Text on the screen, line by line.
    pub fn screen_text(&self) -> String {
        self.look(|screen| screen.contents())
    }

    pub fn screen_state(&self) -> ScreenState {
        self.look(|screen| ScreenState {
            text: screen.contents(),
            formatted: screen.contents_formatted(),
            cursor: screen.cursor_position(),
            hides_cursor: screen.hide_cursor(),
            is_alternate: screen.alternate_screen(),
            input_modes: screen.input_mode_formatted(),
        })
    }

    pub fn look<T>(&self, look: impl FnOnce(&vt100::Screen) -> T) -> T {
        look(self.screen.lock().expect("no thread panics while holding it").screen())
    }

    /// Waits until the screen contains a text.
    pub async fn wait_for(&self, text: &str) {
        eventually(&format!("`{text}` on {}'s screen", self.name), || async { self.screen_text().contains(text).then_some(()) }).await;
    }

    /// Whether the text was ever printed, even if it is no longer on the screen.
    pub fn has_printed(&self, text: &str) -> bool {
        let printed = self.printed.lock().expect("no thread panics while holding it");
        printed.windows(text.len()).any(|window| window == text.as_bytes())
    }

    /// Waits until the text has been printed.
    pub async fn wait_until_printed(&self, text: &str) {
        eventually(&format!("`{text}` printed to {}", self.name), || async { self.has_printed(text).then_some(()) }).await;
    }

    /// Waits until both terminals show the same.
    pub async fn wait_for_same_screen(&self, other: &TestTerminal) {
        let what = format!("{}'s screen to be {}'s", self.name, other.name);
        eventually(&what, || async { (self.screen_state() == other.screen_state()).then_some(()) }).await;
    }

    /// Waits until the program has ended and all its output is on the screen.
    pub async fn ended(&mut self) -> ExitStatus {
        let what = format!("{}'s program to end", self.name);
        let child = &mut self.child;
        let status = eventually(&what, || std::future::ready(child.try_wait().expect("the program's exit status can be read"))).await;
        // Descendants may keep the terminal open longer, and a frozen terminal reads nothing.
        let all_read = async {
            while !self.reader.is_finished() && !*self.frozen.0.lock().expect("no thread panics while holding it") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, all_read).await;
        status
    }
}

impl Drop for TestTerminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "output of a failed test")]
            {
                let ScreenState { text, cursor, hides_cursor, is_alternate, input_modes, .. } = self.screen_state();
                let printed =
                    self.printed.lock().map(|all| all[all.len().saturating_sub(FAILURE_OUTPUT_BYTES)..].escape_ascii().to_string());
                eprintln!("the last output of {}: {}", self.name, printed.unwrap_or_default());
                let modes = String::from_utf8_lossy(&input_modes).escape_debug().to_string();
                eprintln!("{}'s screen: cursor {cursor:?}, hidden {hides_cursor}, alternate {is_alternate}, {modes}\n{text}\n", self.name);
            }
        }
        self.set_frozen(false);
        // Errors are ignored: the program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn winsize(cols: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }
}
