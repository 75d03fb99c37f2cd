//! Certificate authority and certificates, created with openssl, for brokers that serve TLS.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

const NEW_KEY: [&str; 6] = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

pub struct TestAuthority {
    dir: TempDir,
}

/// Files of a certificate and its key.
#[derive(Clone, Debug)]
pub struct TestCertificate {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl TestAuthority {
    #[allow(clippy::new_without_default, reason = "a default must not create files")]
    pub fn new() -> Self {
        let authority = Self { dir: tempfile::tempdir().expect("a temporary directory") };
        let (key, cert) = (authority.path("ca.key"), authority.certificate());
        openssl(&[&NEW_KEY[..], &["-x509", "-days", "2", "-subj", "/CN=test", "-keyout", text(&key), "-out", text(&cert)]].concat());
        authority
    }

    /// The CA certificate, which clients must trust.
    pub fn certificate(&self) -> PathBuf {
        self.path("ca.crt")
    }

    pub fn pem(&self) -> Vec<u8> {
        std::fs::read(self.certificate()).expect("the authority's certificate")
    }

    /// Path of a file in the authority's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Issues a certificate for loopback, with `name` as its subject.
    pub fn sign(&self, name: &str) -> TestCertificate {
        let file = |end: &str| self.path(&format!("{name}.{end}"));
        let signed = TestCertificate { cert: file("crt"), key: file("key") };
        let (request, about, subject) = (file("csr"), file("ext"), format!("/CN={name}"));
        std::fs::write(&about, "subjectAltName=IP:127.0.0.1,DNS:localhost\n").expect("the authority's directory is writable");
        openssl(&[&NEW_KEY[..], &["-subj", &subject, "-keyout", text(&signed.key), "-out", text(&request)]].concat());
        let (ca, ca_key) = (self.certificate(), self.path("ca.key"));
        let by = ["-CA", text(&ca), "-CAkey", text(&ca_key), "-CAcreateserial", "-extfile", text(&about)];
        openssl(&[&["x509", "-req", "-days", "1", "-in", text(&request)], &by[..], &["-out", text(&signed.cert)]].concat());
        signed
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a UTF-8 path")
}

fn openssl(args: &[&str]) {
    let output = Command::new("openssl").args(args).output().expect("openssl is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
