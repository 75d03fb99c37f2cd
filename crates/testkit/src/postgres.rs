//! Real PostgreSQL servers for tests: one server per test process, started on first use, with a separate database for each test. A test
//! that stops its server has its own. A server ends with the process that started it, even if that process is killed.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    net::SocketAddr,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use cobox_protocol::Secret;
use tokio::sync::OnceCell;

use crate::eventually;

/// Directory of each version's programs on Debian.
const VERSIONS: &str = "/usr/lib/postgresql";
const USER: &str = "cobox";
/// Password in every database URL. The server accepts every connection to its socket without checking it; tests search logs and errors
/// for it.
pub const DATABASE_PASSWORD: &str = "a-database-password-nobody-may-see";

/// An empty database on a test server.
pub struct TestDatabase {
    name: String,
    server: Arc<Server>,
}

impl TestDatabase {
    pub async fn new() -> Self {
        Self::on(server().await).await
    }

    /// Creates a database on a separate server, which the test may stop.
    pub async fn on_own_server() -> Self {
        Self::on(Arc::new(Server::start().await)).await
    }

    async fn on(server: Arc<Server>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        server.psql("postgres", &format!("CREATE DATABASE {name}")).unwrap_or_else(|e| panic!("creating a database: {e}"));
        Self { name, server }
    }

    /// Stops the server: connections end, and new ones are refused. Only with [`TestDatabase::on_own_server`].
    pub async fn stop_server(&self) {
        self.server.command("stop");
        eventually("PostgreSQL to stop", || async { self.server.psql("postgres", "SELECT 1").is_err().then_some(()) }).await;
    }

    pub async fn start_server(&self) {
        self.server.command("start");
        eventually("PostgreSQL to answer", || async { self.server.psql("postgres", "SELECT 1").ok() }).await;
    }

    /// Ends the server as a crash does, without a checkpoint and without closing its clients' connections. Only with
    /// [`TestDatabase::on_own_server`].
    pub async fn crash_server(&self) {
        self.server.command("crash");
        eventually("PostgreSQL to end", || async { self.server.psql("postgres", "SELECT 1").is_err().then_some(()) }).await;
    }

    /// Adds a standby with synchronous streaming replication: each commit waits until the standby has it. Only with
    /// [`TestDatabase::on_own_server`].
    pub async fn add_standby(&self) -> Self {
        let standby = Server::start_standby(&self.server).await;
        // After the base backup, so that the standby does not inherit the setting: after its promotion it has no standby to wait for.
        for statement in ["ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"] {
            self.server.psql("postgres", statement).unwrap_or_else(|e| panic!("{statement}: {e}"));
        }
        eventually("the standby to be synchronous", || async {
            let state = self.server.psql("postgres", "SELECT sync_state FROM pg_stat_replication").ok()?;
            (state == "sync").then_some(())
        })
        .await;
        Self { name: self.name.clone(), server: Arc::new(standby) }
    }

    /// Promotes a standby to primary.
    pub fn promote(&self) {
        assert_eq!(self.sql("SELECT pg_promote()"), "t", "the standby is promoted");
    }

    pub fn url(&self) -> String {
        let socket = self.server.dir.to_str().expect("a temporary directory is UTF-8").replace('/', "%2F");
        format!("postgres://{USER}:{DATABASE_PASSWORD}@{socket}/{}", self.name)
    }

    /// URL by way of a proxy that forwards to [`TestDatabase::socket`].
    pub fn secret_url_at(&self, address: SocketAddr) -> Secret {
        Secret::new(format!("postgres://{USER}:{DATABASE_PASSWORD}@{address}/{}", self.name))
    }

    pub fn socket(&self) -> PathBuf {
        self.server.dir.join(".s.PGSQL.5432")
    }

    /// URL for the broker's configuration.
    pub fn secret_url(&self) -> Secret {
        Secret::new(self.url())
    }

    /// Directory of the server's files and log.
    pub fn server_dir(&self) -> PathBuf {
        self.server.dir.clone()
    }

    /// Executes a statement directly, below the store, and returns its result with one line per row.
    pub fn sql(&self, statement: &str) -> String {
        self.server.psql(&self.name, statement).unwrap_or_else(|e| panic!("{statement}: {e}"))
    }
}

struct Server {
    /// Holds the data, the log and the socket.
    dir: PathBuf,
    programs: PathBuf,
    /// Shell that starts and stops the server by commands on its standard input, and ends the server at end of input. The kernel closes the
    /// input when this process ends in any way.
    _supervisor: Child,
    commands: Mutex<ChildStdin>,
}

/// Script of the supervisor; each line of its input is a command.
const SUPERVISOR: &str = r#"
dir=$1; shift
"$@" &
while read -r command; do
    case $command in
        stop) kill -INT $!; wait $! ;;
        crash) kill -QUIT $!; wait $! ;;
        start) "$@" & ;;
    esac
done
kill -QUIT $!; wait; rm -rf "$dir""#;

static SERVER: OnceCell<Arc<Server>> = OnceCell::const_new();

async fn server() -> Arc<Server> {
    SERVER.get_or_init(|| async { Arc::new(Server::start().await) }).await.clone()
}

impl Server {
    async fn start() -> Self {
        let programs = programs();
        let dir = new_dir();
        let (data, template) = (dir.join("data"), template(&programs));
        if !copy(&template, &data) {
            let mut initdb = as_server_user(programs.join("initdb").as_os_str(), &dir);
            initdb.args(["--auth=trust", "--no-sync", "--no-instructions", "--encoding=UTF8", "--locale=C", "--wal-segsize=1"]);
            let made = initdb.arg(format!("--username={USER}")).arg("-D").arg(&data).output().expect("initdb can be started");
            assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
            keep(&data, &template);
        }
        Self::run(dir, programs).await
    }

    async fn start_standby(primary: &Self) -> Self {
        let dir = new_dir();
        let mut backup = as_server_user(primary.programs.join("pg_basebackup").as_os_str(), &dir);
        backup.args(["--write-recovery-conf", "--no-sync", "--checkpoint=fast", "--wal-method=stream", "--username", USER]);
        let made = backup.arg("-h").arg(&primary.dir).arg("-D").arg(dir.join("data")).output().expect("pg_basebackup can be started");
        assert!(made.status.success(), "pg_basebackup: {}", String::from_utf8_lossy(&made.stderr));
        Self::run(dir, primary.programs.clone()).await
    }

    async fn run(dir: PathBuf, programs: PathBuf) -> Self {
        let log = fs::File::create(dir.join("log")).expect("a log");
        let mut supervisor = as_server_user(OsStr::new("/bin/sh"), &dir);
        supervisor
            .args(["-c", SUPERVISOR, "sh"])
            .arg(&dir)
            .arg(programs.join("postgres"))
            .arg("-D")
            .arg(dir.join("data"))
            .arg("-k")
            .arg(&dir)
            // Not reachable over the network. Durability after a power failure matters only to benchmarks, which set COBOX_TEST_SYNC.
            .args(["-c", "listen_addresses=", "-c", "max_connections=200"])
            .args(if std::env::var_os("COBOX_TEST_SYNC").is_some() {
                [].as_slice()
            } else {
                &["-c", "fsync=off", "-c", "full_page_writes=off"]
            })
            .args(["-c", "shared_buffers=32MB", "-c", "autovacuum=off"])
            .stdin(Stdio::piped())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .process_group(0);
        let mut supervisor = supervisor.spawn().expect("a shell can be started");
        let commands = Mutex::new(supervisor.stdin.take().expect("the supervisor's input is a pipe"));
        let server = Self { _supervisor: supervisor, commands, dir, programs };
        eventually("PostgreSQL to answer", || {
            let answer = server.psql("postgres", "SELECT 1");
            async { answer.ok() }
        })
        .await;
        server
    }

    fn command(&self, command: &str) {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(commands, "{command}").expect("the supervisor reads its input");
    }

    fn psql(&self, database: &str, statement: &str) -> Result<String, String> {
        let mut command = Command::new(self.programs.join("psql"));
        command
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", USER, "-d", database, "-c", statement])
            .arg("-h")
            .arg(&self.dir);
        let done = command.stdin(Stdio::null()).output().expect("psql can be started");
        if done.status.success() {
            Ok(String::from_utf8_lossy(&done.stdout).trim_end().to_owned())
        } else {
            Err(String::from_utf8_lossy(&done.stderr).into_owned())
        }
    }
}

/// Creates a directory owned by the server's user.
fn new_dir() -> PathBuf {
    let dir = tempfile::Builder::new().prefix("cobox-pg-").tempdir().expect("a temporary directory").keep();
    if let Some((uid, gid)) = server_user() {
        chown(&dir, Some(uid), Some(gid)).expect("root can change the owner of a directory");
    }
    dir
}

/// User for the server if the tests run as root, because PostgreSQL refuses to run as root.
fn server_user() -> Option<(u32, u32)> {
    rustix::process::geteuid().is_root().then(unprivileged)
}

fn as_server_user(program: &OsStr, dir: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some((uid, gid)) = server_user() {
        command.uid(uid).gid(gid);
    }
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// Template of an initialized data directory, beside the test programs: every test process needs one, and a copy takes a tenth of the time
/// of initdb.
fn template(programs: &Path) -> PathBuf {
    let version = programs.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
    let user = rustix::process::geteuid().as_raw();
    let tests = std::env::current_exe().expect("the path of the test program");
    tests.with_file_name(format!("postgres-{version}-{user}"))
}

/// Stores the template atomically, because other test processes may store it at the same time.
fn keep(data: &Path, template: &Path) {
    let new = template.with_extension(std::process::id().to_string());
    // The second process fails, because a template exists. Without a template, each process runs initdb.
    let _ = if copy(data, &new) { fs::rename(&new, template) } else { Ok(()) };
    let _ = fs::remove_dir_all(&new);
}

fn copy(from: &Path, to: &Path) -> bool {
    let is_copied = from.exists() && Command::new("cp").args(["-a", "--reflink=auto"]).args([from, to]).status().is_ok_and(|s| s.success());
    if !is_copied {
        let _ = fs::remove_dir_all(to);
    }
    is_copied
}

/// Programs of the newest version; most of them are not on the path.
fn programs() -> PathBuf {
    let version = |path: &Path| path.file_name().and_then(OsStr::to_str).and_then(|name| name.parse::<u32>().ok());
    let found = fs::read_dir(VERSIONS).into_iter().flatten().flatten().map(|e| e.path());
    let newest = found.filter(|p| p.join("bin/initdb").exists()).max_by_key(|p| version(p));
    if let Some(newest) = newest {
        return newest.join("bin");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).find(|dir| dir.join("initdb").exists());
    on_path.expect("PostgreSQL's server programs are installed: run scripts/setup")
}

/// The `postgres` user of the package, or `nobody`.
fn unprivileged() -> (u32, u32) {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let ids = |name: &str| {
        let fields: Vec<&str> = users.lines().find(|l| l.starts_with(&format!("{name}:")))?.split(':').collect();
        Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
    };
    ids("postgres").or_else(|| ids("nobody")).expect("there is a user to run PostgreSQL as")
}
