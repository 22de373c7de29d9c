//! A certificate authority, the server's certificate, and kubeconfig files.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::NAMESPACE;

/// Writes a CA certificate to `ca` and returns a TLS acceptor with a certificate of this CA.
pub(super) fn issue(ca: &Path, address: IpAddr) -> Result<TlsAcceptor> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "kubernetes of a test");
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    std::fs::write(ca, issuer.pem()).with_context(|| format!("write {}", ca.display()))?;

    let mut params = CertificateParams::new(vec!["kubernetes.default.svc".to_owned()])?;
    params.subject_alt_names.push(SanType::IpAddress(address));
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The files of a client.
#[derive(Clone, Debug)]
pub struct Files {
    /// Certificate of the authority that signed the server's certificate.
    pub ca: PathBuf,
    /// Token of the agent's ServiceAccount.
    pub token: PathBuf,
    /// Kubeconfig of the agent, with its token.
    pub kubeconfig: PathBuf,
    /// Kubeconfig of a user that may do everything.
    pub admin: PathBuf,
}

impl Files {
    pub(super) fn in_directory(directory: &Path) -> Self {
        Self {
            ca: directory.join("ca.crt"),
            token: directory.join("token"),
            kubeconfig: directory.join("kubeconfig"),
            admin: directory.join("admin.kubeconfig"),
        }
    }

    /// Writes the token files and both kubeconfigs.
    pub(super) fn write(&self, url: &str, token: &str, admin: &str) -> Result<()> {
        let admin_token = self.admin.with_file_name("admin.token");
        std::fs::write(&self.token, token)?;
        std::fs::write(&admin_token, admin)?;
        std::fs::write(&self.kubeconfig, kubeconfig(url, &self.ca, &self.token))?;
        std::fs::write(&self.admin, kubeconfig(url, &self.ca, &admin_token))?;
        Ok(())
    }
}

/// Text of a kubeconfig file for the server at `url`.
pub fn kubeconfig(url: &str, ca: &Path, token: &Path) -> String {
    format!(
        r#"
apiVersion: v1
kind: Config
current-context: test
contexts:
- {{name: test, context: {{cluster: test, user: test, namespace: {NAMESPACE}}}}}
clusters:
- {{name: test, cluster: {{server: "{url}", certificate-authority: {}}}}}
users:
- {{name: test, user: {{tokenFile: {}}}}}
"#,
        ca.display(),
        token.display()
    )
}
