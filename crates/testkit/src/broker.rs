//! A broker in a separate process, started as a user would start it, that tests can kill and restart at any time.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use cobox_client::Client;
use cobox_protocol::{
    Secret,
    key::{CreateKey, PrincipalKind},
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::eventually;

#[derive(Clone, Debug, Default)]
pub struct BrokerOptions {
    /// Contents of `config.toml` in its data directory.
    pub config: String,
    /// User that runs the broker, instead of the one that runs the tests.
    pub uid: Option<u32>,
    /// Runs `cobox serve` with JSON logs instead of `cobox up`.
    pub is_serving: bool,
    /// Database shared with other brokers, for `cobox serve`; all brokers have the same master key.
    pub database: Option<Secret>,
    /// Logs at the `trace` level.
    pub is_verbose: bool,
    /// Size of a separate disk for the data directory, which a test can fill. Requires root.
    pub disk_bytes: Option<u64>,
    /// Directory with another build's `cobox` and `boxd`, which run until [`TestBroker::upgrade`].
    pub programs: Option<PathBuf>,
}

pub struct TestBroker {
    child: Option<Child>,
    home: TempDir,
    programs: PathBuf,
    options: BrokerOptions,
    url: String,
    key: Secret,
}

impl TestBroker {
    pub async fn start() -> Self {
        Self::start_with(BrokerOptions::default()).await
    }

    pub async fn start_with(options: BrokerOptions) -> Self {
        let home = tempfile::Builder::new().prefix("cobox-test-").tempdir().expect("a temporary directory");
        let data = home.path().join("data");
        fs::create_dir(&data).expect("a data directory");
        if let Some(bytes) = options.disk_bytes {
            mount_disk(&home.path().join("disk"), bytes, &data);
        }
        // Deleted sandboxes go at once, except in the tests of restoring them.
        // An older build may not know the setting.
        let is_set = options.config.contains("keep_deleted_seconds") || options.programs.is_some();
        let keeps = if is_set { "" } else { "keep_deleted_seconds = 0\n" };
        fs::write(data.join("config.toml"), format!("{keeps}{}", options.config)).expect("a configuration");
        if options.database.is_some() {
            let key = data.join("master.key");
            fs::write(&key, [7; 32]).expect("a master key");
            fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("the key file is the test's own");
        }
        let mut programs = options.programs.clone().unwrap_or_else(built_programs);
        if let Some(uid) = options.uid {
            // Another user may not have access to the build directory.
            let copies = home.path().join("bin");
            fs::create_dir(&copies).expect("a directory for the programs");
            for name in ["cobox", "boxd"] {
                fs::copy(programs.join(name), copies.join(name)).expect("the programs are built");
            }
            programs = copies;
            for path in [home.path(), &data, &data.join("config.toml")] {
                chown(path, Some(uid), Some(uid)).expect("tests that change users run as root");
            }
            fs::set_permissions(&programs, fs::Permissions::from_mode(0o755)).expect("the program directory is the test's own");
        }
        let mut broker = Self { child: None, home, programs, options, url: String::new(), key: Secret::new("") };
        broker.launch().await;
        broker
    }

    /// Starts the broker, over existing data if there is any.
    pub async fn launch(&mut self) {
        assert!(self.child.is_none(), "the broker is running");
        // A killed broker leaves its address file.
        let _ = fs::remove_file(self.data_dir().join("broker.json"));
        let log = fs::File::options().create(true).append(true).open(self.home.path().join("broker.log")).expect("a log");
        let mut command = self.cobox();
        match &self.options.database {
            None if !self.options.is_serving => command.arg("up"),
            url => {
                command.env("COBOX_DATABASE_URL", url.as_ref().map_or("", Secret::expose));
                command.args(["serve", "--config"]).arg(self.data_dir().join("config.toml"))
            }
        };
        if self.options.is_serving {
            command.args(["--log-format", "json"]);
        }
        if self.options.is_verbose {
            command.env("COBOX_LOG", "trace");
        }
        if self.options.is_verbose && self.options.database.is_some() {
            command.args(["--log-format", "json"]);
        }
        command.args(["--listen", "127.0.0.1:0", "--data-dir"]).arg(self.data_dir());
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        if let Some(uid) = self.options.uid {
            command.uid(uid).gid(uid);
        }
        let mut child = command.spawn().expect("cobox can be started");
        let file = self.data_dir().join("broker.json");
        let ready: serde_json::Value = eventually("the broker to be ready", || {
            if let Ok(Some(status)) = child.try_wait() {
                panic!("the broker ended with {status}: {}", self.log());
            }
            let ready = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            async { ready }
        })
        .await;
        self.child = Some(child);
        self.url = ready["url"].as_str().expect("a url").to_owned();
        self.key = Secret::new(fs::read_to_string(ready["api_key_file"].as_str().expect("a key file")).expect("a key").trim());
    }

    /// The next launch runs this build's programs.
    pub fn upgrade(&mut self) {
        self.programs = built_programs();
    }

    pub fn data_dir(&self) -> PathBuf {
        self.home.path().join("data")
    }
    pub fn url(&self) -> &str {
        &self.url
    }
    pub fn key(&self) -> &Secret {
        &self.key
    }
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the broker is running").id()
    }
    pub fn running_pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }
    pub fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("broker.log")).unwrap_or_default()
    }

    /// Client with the operator key that the broker created at its first start.
    pub fn client(&self) -> Client {
        Client::new(&self.url, self.key.clone()).expect("a client")
    }

    /// Creates a principal's key and returns a client with it.
    pub async fn client_of(&self, name: &str, kind: PrincipalKind, workspace: Option<&str>) -> Client {
        Client::new(&self.url, self.key_of(name, kind, workspace).await).expect("a client")
    }

    pub async fn key_of(&self, name: &str, kind: PrincipalKind, workspace: Option<&str>) -> Secret {
        let request = CreateKey { name: name.to_owned(), kind, workspace: workspace.map(str::to_owned), expires_at: None };
        self.client().create_key(&request).await.expect("a key").api_key
    }

    /// The `cobox` program, configured for this broker.
    pub fn cobox(&self) -> Command {
        let mut command = Command::new(self.programs.join("cobox"));
        command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", self.home.path());
        if !self.url.is_empty() {
            command.env("COBOX_URL", &self.url).env("COBOX_API_KEY", self.key.expose());
        }
        command
    }

    /// Kills the broker, as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("the broker can be killed");
            child.wait().expect("the broker's exit status can be read");
        }
    }

    /// Sends the signal of Ctrl-C and waits for the end.
    pub fn interrupt(&mut self) -> std::process::ExitStatus {
        let mut child = self.child.take().expect("the broker is running");
        let pid = Pid::from_raw(child.id() as i32).expect("a pid");
        kill_process(pid, Signal::INT).expect("the broker can be interrupted");
        child.wait().expect("the broker's exit status can be read")
    }

    /// Removes what a reboot would remove: a dead broker's control groups and sockets.
    pub fn sweep(&self) {
        assert!(self.child.is_none(), "the broker is running");
        crate::leftovers::sweep(&self.data_dir());
    }

    /// Id and first process of each running sandbox.
    pub fn sandbox_pids(&self) -> Vec<(String, i32)> {
        let entries = fs::read_dir(self.data_dir().join("sandboxes")).into_iter().flatten().flatten();
        entries
            .filter_map(|e| {
                let record: serde_json::Value = serde_json::from_slice(&fs::read(e.path().join("run.json")).ok()?).ok()?;
                Some((e.file_name().into_string().ok()?, record["pid"].as_i64()? as i32))
            })
            .collect()
    }
}

impl Drop for TestBroker {
    fn drop(&mut self) {
        if self.child.is_some() && !std::thread::panicking() {
            // A regular shutdown removes the control groups and sockets of its sandboxes.
            self.interrupt();
        }
        self.kill();
        for (_, pid) in self.sandbox_pids() {
            // Recorded by this broker a moment ago. Errors are ignored: the process may have ended already.
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        crate::leftovers::sweep(&self.data_dir());
        if self.options.disk_bytes.is_some() {
            // Lazily, because images on it may still be in use; it is unmounted with the last of them.
            let _ = Command::new("umount").arg("-l").arg(self.data_dir()).status();
        }
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<_> = log.lines().rev().take(40).collect();
            #[allow(clippy::print_stderr, reason = "output of a failed test")]
            {
                eprintln!("the broker's last log lines:");
                tail.iter().rev().for_each(|line| eprintln!("  {line}"));
            }
        }
    }
}

/// Mounts a separate file system at a directory.
fn mount_disk(image: &Path, bytes: u64, at: &Path) {
    fs::File::create(image).and_then(|file| file.set_len(bytes)).expect("an image");
    for command in
        [Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(image), Command::new("mount").args(["-o", "loop"]).arg(image).arg(at)]
    {
        let output = command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").output().expect("mkfs.ext4 and mount are installed");
        assert!(output.status.success(), "{output:?}");
    }
}

/// Directory of the built `cobox` and `boxd`: two levels above the test program.
fn built_programs() -> PathBuf {
    let test = std::env::current_exe().expect("a running program");
    let dir = test.parent().and_then(Path::parent).expect("target/…/deps").to_owned();
    assert!(dir.join("cobox").exists() && dir.join("boxd").exists(), "build the programs first: cargo build -p cobox-cli -p cobox-boxd");
    dir
}
