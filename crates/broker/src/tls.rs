//! TLS from certificate files, which are reloaded when they change, so that a renewed certificate needs no restart.

use std::{
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::RwLock;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use sha2::{Digest, Sha256};
use tokio_rustls::TlsAcceptor;
use zeroize::Zeroizing;

use crate::config::TlsFiles;

/// Maximum size of a certificate or key file, in bytes: ten times a chain of ten large certificates.
const MAX_FILE_BYTES: u64 = 256 * 1024;
/// How often the files are checked.
const CERTIFICATE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{}: can't be read: {cause}", path.display())]
    Unreadable { path: PathBuf, cause: std::io::Error },
    #[error("{}: is larger than {MAX_FILE_BYTES} bytes, which no certificate or key is", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}: contains no PEM certificate; it must start with the server's certificate, followed by its issuers'", path.display())]
    NoCertificate { path: PathBuf },
    #[error("{}: contains no PEM private key (PKCS#8, PKCS#1 or SEC1, not encrypted)", path.display())]
    NoKey { path: PathBuf },
    #[error("{} and {} don't match: the key is not that of the first certificate", cert.display(), key.display())]
    Mismatch { cert: PathBuf, key: PathBuf },
    #[error("{}: can't be used: {cause}", path.display())]
    Unusable { path: PathBuf, cause: rustls::Error },
}

/// The certificate for new connections.
pub struct Tls {
    files: TlsFiles,
    current: RwLock<Current>,
}

struct Current {
    acceptor: TlsAcceptor,
    /// Digest of both files as last read.
    digest: [u8; 32],
}

impl Tls {
    pub fn load(files: &TlsFiles) -> Result<Arc<Self>, TlsError> {
        Ok(Arc::new(Self { files: files.clone(), current: RwLock::new(read(files)?) }))
    }

    pub fn acceptor(&self) -> TlsAcceptor {
        self.current.read().acceptor.clone()
    }

    /// Reloads the files and returns whether they had changed. On an error the current certificate stays in use.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let new = read(&self.files)?;
        let mut current = self.current.write();
        let is_new = new.digest != current.digest;
        if is_new {
            *current = new;
        }
        Ok(is_new)
    }

    /// Reloads the files when they change. Both are rarely replaced at the same instant; until they match, the old ones
    /// stay in use.
    pub async fn watch(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(CERTIFICATE_CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut is_told = false;
        loop {
            ticks.tick().await;
            let tls = self.clone();
            let Ok(looked) = tokio::task::spawn_blocking(move || tls.reload()).await else { continue };
            is_told = self.log_reload(looked, is_told);
        }
    }

    /// Logs an error once, not at every check.
    fn log_reload(&self, looked: Result<bool, TlsError>, is_told: bool) -> bool {
        match looked {
            Ok(is_new) => {
                if is_new {
                    tracing::info!(cert = %self.files.cert.display(), "certificate reloaded");
                }
                false
            }
            Err(error) => {
                if !is_told {
                    tracing::error!(%error, "reloading the certificate failed; the previous one stays in use");
                }
                true
            }
        }
    }
}

fn read(files: &TlsFiles) -> Result<Current, TlsError> {
    let (cert_pem, key_pem) = (read_file(&files.cert)?, read_file(&files.key)?);
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&cert_pem).filter_map(Result::ok).collect();
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: files.cert.clone() });
    }
    let key = PrivateKeyDer::from_pem_slice(&key_pem).map_err(|_| TlsError::NoKey { path: files.key.clone() })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unusable = |cause| TlsError::Unusable { path: files.cert.clone(), cause };
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(unusable)?;
    let mut config = builder.with_no_client_auth().with_single_cert(chain, key).map_err(|cause| match cause {
        rustls::Error::InconsistentKeys(_) => TlsError::Mismatch { cert: files.cert.clone(), key: files.key.clone() },
        cause => TlsError::Unusable { path: files.cert.clone(), cause },
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let digest = Sha256::new().chain_update(&*cert_pem).chain_update([0]).chain_update(&*key_pem).finalize().into();
    Ok(Current { acceptor: TlsAcceptor::from(Arc::new(config)), digest })
}

fn read_file(path: &Path) -> Result<Zeroizing<Vec<u8>>, TlsError> {
    let unreadable = |cause| TlsError::Unreadable { path: path.to_owned(), cause };
    let mut bytes = Zeroizing::new(Vec::new());
    std::fs::File::open(path).map_err(unreadable)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(TlsError::TooLarge { path: path.to_owned() });
    }
    Ok(bytes)
}
