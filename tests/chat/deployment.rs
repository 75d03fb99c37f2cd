//! Starts a real `langgraph dev` with the example deployment for one test.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use cobox_langgraph::Deployment;
use cobox_protocol::{Secret, key::PrincipalKind};
use cobox_testkit::TestBroker;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Time limit for the server to start: it imports all of LangChain first.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// A credential of a user that the example knows.
pub const ANN: &str = "ann-secret";

pub struct Example {
    pub url: String,
    child: Child,
    folder: TempDir,
}

impl Example {
    /// Starts a deployment that uses sandboxes of this broker.
    pub async fn start(broker: &TestBroker) -> Self {
        let programs = PathBuf::from(std::env::var_os("COBOX_LANGGRAPH_BIN").expect("set by scripts/check-langgraph"));
        let folder = tempfile::Builder::new().prefix("cobox-chat-").tempdir().expect("a folder");
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/langgraph");
        for file in fs::read_dir(example).expect("the example").flatten().filter(|f| f.path().is_file()) {
            fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
        }
        let key = broker.key_of("my-deployment", PrincipalKind::Human, None).await;
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let url = format!("http://127.0.0.1:{port}");
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let mut command = Command::new(programs.join("langgraph"));
        command.args(["dev", "--host", "127.0.0.1", "--no-browser", "--no-reload", "--port", &port.to_string()]).current_dir(folder.path());
        command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", programs.display())).env("HOME", folder.path());
        command.envs([("LANGSMITH_TRACING", "false"), ("LANGGRAPH_CLI_NO_ANALYTICS", "1"), ("NO_PROXY", "127.0.0.1")]);
        command.env("COBOX_URL", broker.url()).env("COBOX_API_KEY", key.expose()).env("COBOX_LANGGRAPH_RELAY", &url);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
        let child = command.spawn().expect("langgraph runs");
        let mut example = Self { url, child, folder };
        example.wait().await;
        example
    }

    async fn wait(&mut self) {
        let client = self.as_ann();
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        while client.assistants().await.is_err() {
            let ended = self.child.try_wait().expect("the process can be queried");
            assert!(ended.is_none() && tokio::time::Instant::now() < deadline, "langgraph dev did not start: {}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn as_ann(&self) -> Deployment {
        deployment(&self.url)
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        log[log.floor_char_boundary(log.len().saturating_sub(4000))..].to_owned()
    }
}

pub fn deployment(url: &str) -> Deployment {
    Deployment::new(url, Some(&Secret::new(ANN)), None).expect("a client")
}

impl Drop for Example {
    fn drop(&mut self) {
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "shown for a failed test")]
            {
                eprintln!("the deployment's last output:\n{}", self.log());
            }
        }
        // SIGINT, so that the server ends its own child processes. It may have ended already.
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::INT);
        }
        let _ = self.child.wait();
    }
}
