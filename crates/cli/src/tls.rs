//! How a broker is reached from other machines: with a TLS certificate, or in plain text behind a proxy that
//! terminates TLS.

use std::path::PathBuf;

use cobox_broker::{Config, TlsFiles};

use crate::failure::Failure;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "TLS")]
pub struct TlsArgs {
    /// Serve HTTPS with this certificate chain: a PEM file, server certificate first; reloaded when it changes and on
    /// SIGHUP
    #[arg(long, value_name = "FILE", env = "COBOX_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate: an unencrypted PEM file
    #[arg(long, value_name = "FILE", env = "COBOX_TLS_KEY")]
    tls_key: Option<PathBuf>,
    /// Allow listening beyond this machine without TLS, for use behind a proxy that terminates TLS
    #[arg(long)]
    insecure_listen: bool,
}

impl TlsArgs {
    /// Values from flags and environment replace those of the file.
    pub fn apply(self, config: &mut Config) -> Result<(), Failure> {
        config.insecure_listen |= self.insecure_listen;
        config.tls = match (self.tls_cert, self.tls_key, config.tls.take()) {
            (None, None, configured) => configured,
            (Some(cert), Some(key), _) => Some(TlsFiles { cert, key }),
            (Some(cert), None, Some(configured)) => Some(TlsFiles { cert, ..configured }),
            (None, Some(key), Some(configured)) => Some(TlsFiles { key, ..configured }),
            (Some(_), None, None) => {
                return Err(Failure::new("--tls-cert needs --tls-key").with_advice("pass the private key with --tls-key"));
            }
            (None, Some(_), None) => {
                return Err(Failure::new("--tls-key needs --tls-cert").with_advice("pass the certificate with --tls-cert"));
            }
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_needs_a_key_and_flags_override_the_file() {
        let args = |cert: Option<&str>, key: Option<&str>| TlsArgs {
            tls_cert: cert.map(PathBuf::from),
            tls_key: key.map(PathBuf::from),
            insecure_listen: false,
        };
        let mut config = Config::default();
        assert!(args(Some("c"), None).apply(&mut config).is_err());
        args(Some("c"), Some("k")).apply(&mut config).unwrap();
        args(Some("c2"), None).apply(&mut config).unwrap();
        assert_eq!(config.tls, Some(TlsFiles { cert: "c2".into(), key: "k".into() }));
    }
}
