//! Shared parts of `cobox up` and `cobox serve`: the local provider, the listening socket, logging, and the signals
//! that stop a broker.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use cobox_provider::local::{Check, CheckStatus, LocalConfig, LocalOptions, LocalProvider};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
};
use tracing_subscriber::EnvFilter;

use crate::failure::{Failure, INTERRUPTED, TERMINATED};

/// Runs on a blocking thread: it prepares the sandboxes' root file system, which can take a second the first time.
pub async fn local_provider(data_dir: &Path, options: LocalOptions) -> Result<LocalProvider, Failure> {
    let (launcher, boxd) = program_paths()?;
    let config = LocalConfig { data_dir: data_dir.to_owned(), boxd, launcher, options };
    let provider = tokio::task::spawn_blocking(move || LocalProvider::new(config)).await.context("preparing the local provider")?;
    provider.map_err(|e| Failure::from(e).with_advice("run `cobox doctor` to check the requirements of local sandboxes"))
}

/// The paths of this program and of the daemon that runs in each sandbox.
fn program_paths() -> Result<(PathBuf, PathBuf), Failure> {
    let launcher = std::env::current_exe().context("finding this program")?;
    let boxd = boxd_path(&launcher, std::env::var_os("COBOX_BOXD").map(PathBuf::from));
    Ok((launcher, boxd))
}

/// Checks that boxd is where a broker would load it from.
pub fn check_boxd() -> Result<Check, Failure> {
    Ok(check_boxd_at(&program_paths()?.1))
}

fn check_boxd_at(path: &Path) -> Check {
    let shown = path.display();
    let (status, detail, fix) = match std::fs::metadata(path) {
        Err(e) => {
            (CheckStatus::Missing, format!("{shown}: {e}"), Some("place boxd next to cobox, or set COBOX_BOXD to its path".to_owned()))
        }
        Ok(meta) if !meta.is_file() => (CheckStatus::Missing, format!("{shown} is not a file"), None),
        Ok(_) if rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_err() => {
            (CheckStatus::Missing, format!("{shown} is not executable"), Some(format!("chmod +x {shown}")))
        }
        Ok(_) => (CheckStatus::Enforced, shown.to_string(), None),
    };
    Check { name: "boxd".to_owned(), status, detail, fix }
}

/// Beside this program, unless `COBOX_BOXD` names another path.
fn boxd_path(launcher: &Path, explicit: Option<PathBuf>) -> PathBuf {
    explicit.filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| launcher.with_file_name("boxd"))
}

/// Parses a listen address: `127.0.0.1:8421`, `localhost:8421`, or a port on the loopback address.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    let addresses: Vec<SocketAddr> =
        text.to_socket_addrs().map_err(|_| "expected an address such as 127.0.0.1:8421, localhost:8421 or 8421".to_owned())?.collect();
    // A name may resolve to IPv4 and IPv6; IPv4 is the most compatible with local clients and URLs.
    addresses.iter().find(|a| a.is_ipv4()).or(addresses.first()).copied().ok_or_else(|| "the name resolves to no address".to_owned())
}

pub async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|e| {
        let failure = Failure::new(format!("can't listen on {address}: {e}"));
        match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                failure.with_advice("another program uses the port; choose another one, or --listen 127.0.0.1:0 for any free port")
            }
            _ => failure,
        }
    })
}

/// The URL under which clients on this machine reach a broker bound to `address`.
pub fn local_url(scheme: &str, address: SocketAddr) -> String {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    format!("{scheme}://{}", SocketAddr::new(ip, address.port()))
}

/// Logs to stderr, filtered by `COBOX_LOG`, for example `COBOX_LOG=cobox_broker=debug`.
pub fn init_logging(default: &str, json: bool) {
    let filter = EnvFilter::try_from_env("COBOX_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Fails only on a second call; each process calls it once.
    let _ = if json { builder.json().flatten_event(true).try_init() } else { builder.with_ansi(false).try_init() };
}

/// SIGHUP, which asks a service to reload its files.
pub fn reload_signal() -> Result<Signal, Failure> {
    Ok(signal(SignalKind::hangup())?)
}

/// The signals that stop a broker: SIGINT (Ctrl-C) and SIGTERM.
pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    pub fn new() -> Result<Self, Failure> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    pub async fn recv(&mut self) {
        self.recv_exit_code().await;
    }

    /// Waits for a signal and returns the shell's exit code for it.
    pub async fn recv_exit_code(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => INTERRUPTED,
            _ = self.terminate.recv() => TERMINATED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxd_is_beside_this_program_unless_named() {
        let launcher = Path::new("/opt/cobox/cobox");
        assert_eq!(boxd_path(launcher, None), Path::new("/opt/cobox/boxd"));
        assert_eq!(boxd_path(launcher, Some("/x/boxd".into())), Path::new("/x/boxd"));
        assert_eq!(boxd_path(launcher, Some("".into())), Path::new("/opt/cobox/boxd"));
    }

    #[test]
    fn an_address_may_be_a_name_or_just_a_port() {
        for text in ["127.0.0.1:8421", "localhost:8421", "8421"] {
            assert_eq!(parse_address(text).unwrap(), "127.0.0.1:8421".parse().unwrap(), "{text}");
        }
        assert!(parse_address("localhost").is_err() && parse_address("70000").is_err());
    }

    #[test]
    fn a_missing_or_non_executable_boxd_is_reported_with_a_fix() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("boxd");
        assert!(check_boxd_at(&path).fix.unwrap().contains("COBOX_BOXD"));
        std::fs::write(&path, "").unwrap();
        assert!(check_boxd_at(&path).fix.unwrap().contains("chmod"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(check_boxd_at(&path).status, CheckStatus::Enforced);
    }

    #[test]
    fn a_broker_on_every_address_is_reached_through_loopback() {
        assert_eq!(local_url("http", "0.0.0.0:80".parse().unwrap()), "http://127.0.0.1:80");
        assert_eq!(local_url("http", "[::]:80".parse().unwrap()), "http://[::1]:80");
        assert_eq!(local_url("http", "10.0.0.1:80".parse().unwrap()), "http://10.0.0.1:80");
    }
}
