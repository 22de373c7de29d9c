//! Certificates of relays and agents.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// Paths of the PEM files with which a relay or an agent authenticates itself.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// Certificate of the authority that signed the certificates of both sides.
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Certificates {
    /// Writes certificates of an authority, a relay and an agent to `directory`. Returns the
    /// certificates of the relay and of the agent.
    pub fn issue(directory: &Path) -> Result<(Self, Self)> {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("create {}", directory.display()))?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let name = format!("relays of {}", directory.display());
        params.distinguished_name.push(DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let authority = directory.join("ca.crt");
        std::fs::write(&authority, issuer.pem())?;
        let side = |name: &str| -> Result<Self> {
            let params = CertificateParams::new(vec![name.to_owned()])?;
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &issuer)?;
            let files = Self {
                authority: authority.clone(),
                certificate: directory.join(format!("{name}.crt")),
                key: directory.join(format!("{name}.key")),
            };
            std::fs::write(&files.certificate, certificate.pem())?;
            std::fs::write(&files.key, key.serialize_pem())?;
            Ok(files)
        };
        Ok((side("holdfast-relay")?, side("holdfast-agent")?))
    }
}
