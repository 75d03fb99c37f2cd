//! `cobox shell` in common environments: inside tmux, and over ssh.

use std::{path::Path, process::Command};

use cobox_testkit::{TestTerminal, eventually};

use super::*;

/// A separate tmux server for the test.
struct Tmux {
    dir: tempfile::TempDir,
}

impl Tmux {
    fn start() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LANG", "C.UTF-8").env("TERM", "xterm-256color").env("SHELL", "/bin/sh");
        command.arg("-S").arg(self.dir.path().join("tmux")).args(["-f", "/dev/null"]).args(words);
        command
    }

    fn run(&self, words: &[&str]) -> String {
        let output = self.command(words).output().expect("tmux runs");
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a program in a window of 80×24.
    fn window(&self, name: &str, program: &Command, dir: &Path) {
        let mut words = vec!["new-session", "-d", "-s", name, "-x", "80", "-y", "24", "-c", dir.to_str().unwrap()];
        let env: Vec<String> =
            program.get_envs().filter_map(|(n, v)| Some(format!("{}={}", n.to_str().unwrap(), v?.to_str().unwrap()))).collect();
        for pair in &env {
            words.extend(["-e", pair.as_str()]);
        }
        words.push(program.get_program().to_str().unwrap());
        words.extend(program.get_args().map(|w| w.to_str().unwrap()));
        self.run(&words);
        self.run(&["set", "-g", "status", "off"]);
        self.run(&["set", "-g", "remain-on-exit", "on"]);
    }

    /// The window's text and colours.
    fn screen(&self, name: &str) -> String {
        self.run(&["capture-pane", "-p", "-e", "-t", name])
    }

    async fn wait_for(&self, name: &str, text: &str) {
        eventually(&format!("`{text}` in tmux's {name}"), || async { self.screen(name).contains(text).then_some(()) }).await;
    }

    fn press(&self, name: &str, keys: &[&str]) {
        self.run(&[&["send-keys", "-t", name][..], keys].concat());
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.command(&["kill-server"]).output();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_looks_the_same_inside_tmux() {
    let broker = broker_with_sandbox().await;
    let tmux = Tmux::start();
    let dir = tempfile::tempdir().unwrap();
    let mut vim = Command::new("/bin/sh");
    vim.args(["-c", "vim -u NONE -i NONE -n -N text.txt"]).env("PATH", "/usr/bin:/bin").env("HOME", dir.path());
    tmux.window("here", &vim, dir.path());
    let cobox = shell_command(&broker, "ada", &["-c", "vim -u NONE -i NONE -n -N text.txt"]).await;
    // Prints the exit code as a shell sees it, because tmux sometimes misses a program's end.
    let mut there = Command::new("/bin/sh");
    there.args(["-c", "\"$0\" \"$@\"; echo code $?; read line"]).arg(cobox.get_program()).args(cobox.get_args());
    there.envs(cobox.get_envs().filter_map(|(name, value)| Some((name, value?))));
    tmux.window("there", &there, dir.path());
    for name in ["here", "there"] {
        tmux.wait_for(name, "[New]").await;
        tmux.press(name, &["-l", "ihéllo 漢字, "]);
        tmux.press(name, &["F5", "Home", "Escape"]);
        tmux.press(name, &["-l", ":hi Normal ctermfg=201 ctermbg=17"]);
        tmux.press(name, &["Enter"]);
        tmux.press(name, &["-l", ":set number | split"]);
        tmux.press(name, &["Enter"]);
        tmux.wait_for(name, "text.txt [+]").await;
    }
    eventually("the same in both", || async { (tmux.screen("here") == tmux.screen("there")).then_some(()) }).await;
    for name in ["here", "there"] {
        tmux.run(&["resize-window", "-t", name, "-x", "60", "-y", "18"]);
    }
    eventually("the same in both, resized", || async {
        let (here, there) = (tmux.screen("here"), tmux.screen("there"));
        (here == there && here.lines().count() == 18 && here.contains("text.txt [+]")).then_some(())
    })
    .await;
    // Show and hide the status line, then detach.
    tmux.press("there", &["Escape", "Enter", "~", "s"]);
    tmux.wait_for("there", "you have control · connected · 60×18").await;
    tmux.press("there", &["Enter", "~", "."]);
    tmux.wait_for("there", "detached from").await;
    tmux.wait_for("there", "code 255").await;
    let state = tmux.run(&["display-message", "-p", "-t", "there", "#{alternate_on} #{mouse_any_flag}"]);
    assert_eq!(state.trim(), "0 0");
}

/// An ssh server on loopback that accepts one key, for the lifetime of this value.
struct Sshd {
    server: std::process::Child,
    dir: tempfile::TempDir,
    port: u16,
}

impl Sshd {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for key in ["host", "user"] {
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]).status().expect("ssh-keygen runs");
            assert!(made.success());
        }
        // An sshd that runs as root requires this empty directory.
        let _ = std::fs::create_dir_all("/run/sshd");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\nStrictModes no\n\
             PasswordAuthentication no\nPermitRootLogin prohibit-password\nAcceptEnv *\n",
            path("host"),
            path("user.pub")
        );
        std::fs::write(dir.path().join("config"), config).unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let server = Command::new("/usr/sbin/sshd").args(["-D", "-e", "-f", &path("config")]).stderr(log).spawn().expect("sshd runs");
        eventually("sshd to listen", || async { std::net::TcpStream::connect(("127.0.0.1", port)).ok() }).await;
        Self { server, dir, port }
    }

    /// The program over ssh, in a terminal that ssh allocates.
    fn ssh_command(&self, program: &Command) -> Command {
        let env = program.get_envs().filter_map(|(n, v)| Some(format!("{}='{}'", n.to_str().unwrap(), v?.to_str().unwrap())));
        let words = [program.get_program()].into_iter().chain(program.get_args()).map(|w| format!("'{}'", w.to_str().unwrap()));
        let line = std::iter::once("exec env".to_owned()).chain(env).chain(words).collect::<Vec<_>>().join(" ");
        let mut ssh = Command::new("ssh");
        ssh.env("PATH", "/usr/bin:/bin").env("HOME", self.dir.path());
        ssh.args(["-F", "/dev/null", "-tt", "-e", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]);
        ssh.args(["-o", "LogLevel=ERROR", "-p", &self.port.to_string(), "-i"]).arg(self.dir.path().join("user"));
        ssh.args(["127.0.0.1", &line]);
        ssh
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_looks_the_same_over_ssh() {
    let broker = broker_with_sandbox().await;
    let sshd = Sshd::start().await;
    let dir = tempfile::tempdir().unwrap();
    let mut here = run_locally("here", dir.path(), "vim -u NONE -i NONE -n -N text.txt");
    let program = shell_command(&broker, "ada", &["-c", "vim -u NONE -i NONE -n -N text.txt"]).await;
    let mut there = TestTerminal::start("there", &sshd.ssh_command(&program), SIZE);
    for terminal in [&mut here, &mut there] {
        terminal.wait_for("[New]").await;
        terminal.press("ihéllo 漢字 over ssh");
        terminal.wait_for("over ssh").await;
    }
    there.wait_for_same_screen(&here).await;
    for terminal in [&mut here, &mut there] {
        terminal.resize(100, 30);
    }
    there.wait_for_same_screen(&here).await;
    for terminal in [&mut here, &mut there] {
        terminal.press("\x1b:q!\r");
        assert_eq!(terminal.ended().await.code(), Some(0));
        assert!(terminal.is_cooked());
    }
    // The exit code passes through both.
    let program = shell_command(&broker, "ada", &["-c", "exit 7"]).await;
    let mut there = TestTerminal::start("there", &sshd.ssh_command(&program), SIZE);
    assert_eq!(there.ended().await.code(), Some(7));
}
