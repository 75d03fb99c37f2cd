//! A person at a terminal: a real pty with a program in it, a screen that shows what the program draws, and a keyboard.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::eventually;

pub struct TestTerminal {
    name: &'static str,
    keyboard: File,
    child: Child,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl TestTerminal {
    /// Starts the program with this terminal as its own.
    pub fn start(name: &'static str, program: &Command, (cols, rows): (u16, u16)) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pty");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("its other side");
        tcsetwinsize(&master, winsize(cols, rows)).expect("a size");
        let path = ptsname(&master, Vec::new()).expect("its name").into_string().expect("UTF-8");
        let slave = || Stdio::from(File::options().read(true).write(true).open(&path).expect("its other side"));
        // The program must be the terminal's own, or it never hears that the window has another size.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program.get_program()).args(program.get_args()).env_clear();
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("TERM", "xterm-256color");
        let child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().expect("the program runs");
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, cols, 0)));
        let keyboard = File::from(master);
        let mut output = keyboard.try_clone().expect("another handle");
        let seen = screen.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 16 * 1024];
            // Ends when the program and all it started have let go of the terminal.
            while let Ok(n @ 1..) = output.read(&mut buffer) {
                seen.lock().expect("nobody panics with it").process(&buffer[..n]);
            }
        });
        Self { name, keyboard, child, screen }
    }

    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal takes it");
    }

    pub fn resize(&mut self, cols: u16, rows: u16) {
        self.screen.lock().expect("nobody panics with it").screen_mut().set_size(rows, cols);
        tcsetwinsize(&self.keyboard, winsize(cols, rows)).expect("a size");
    }

    /// What is on the screen, line by line.
    pub fn shows(&self) -> String {
        self.look(|screen| screen.contents())
    }

    pub fn look<T>(&self, look: impl FnOnce(&vt100::Screen) -> T) -> T {
        look(self.screen.lock().expect("nobody panics with it").screen())
    }

    /// Waits until a text is on the screen.
    pub async fn wait_for(&self, text: &str) {
        eventually(&format!("`{text}` on {}'s screen", self.name), || async { self.shows().contains(text).then_some(()) }).await;
    }

    /// Waits for the program's end.
    pub async fn ended(&mut self) -> ExitStatus {
        let what = format!("{}'s program to end", self.name);
        let child = &mut self.child;
        eventually(&what, || std::future::ready(child.try_wait().expect("it can be asked"))).await
    }
}

impl Drop for TestTerminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "what a failed test shows")]
            {
                eprintln!("{}'s screen:\n{}\n", self.name, self.shows());
            }
        }
        // Ended already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn winsize(cols: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }
}
