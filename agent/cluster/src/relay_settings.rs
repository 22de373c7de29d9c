//! Settings of relays and of agents that follow them, and the certificates of both sides.
//!
//! A relay and an agent each have a certificate of one authority that signs nothing else. The names in
//! the agents' certificates have no meaning.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use daemon::command_line::metrics_address::MetricsAddress;

use crate::ApiSettings;

/// Which relays an agent follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelaySettings {
    /// Relays that the agent tries in turn, each as `host:port`.
    pub addresses: Vec<String>,
    /// `None` = plain text, on loopback only.
    pub tls: Option<TlsFiles>,
    /// Name in the relays' certificate.
    pub server_name: String,
}

/// Checked settings of `holdfast-agent relay`.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    pub kubernetes: ApiSettings,
    /// `--without-service-cidrs` is given: the kind ServiceCIDR may then be absent, and the agents
    /// have the blocks of Services from `--k8s-service-cidr`.
    pub has_service_blocks: bool,
    /// Identities of the cluster are objects (`--identity-allocation=cluster`): the relay sends them.
    pub has_identities: bool,
    /// `--with-world-cidrs` is given: the relay sends CiliumWorldCIDRs.
    pub has_world_cidrs: bool,
    /// Address on which the relay accepts agents.
    pub listen: SocketAddr,
    /// `None` = plain text, on loopback only.
    pub tls: Option<TlsFiles>,
    /// Maximum number of agents at once (`--max-agents`). Fewer are served if the limit on open descriptors is
    /// too low.
    pub agents_max: usize,
    /// Name of this relay where it reports refused objects; the host name by default.
    pub name: String,
    /// Address of metrics and health.
    pub metrics_address: MetricsAddress,
}

/// Certificate files of one side, the relay or the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authority that signed the other side's certificate.
    pub authority: PathBuf,
    /// Certificate of this side, with the certificates between it and the authority.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// One of the files in [`TlsFiles`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsFile {
    Authority,
    Certificate,
    Key,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}", path = .path.display())]
pub struct TlsError {
    pub file: TlsFile,
    pub(super) path: PathBuf,
    pub(super) reason: String,
}

/// The content of the files, in the PEM format.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsTexts {
    pub(super) authority: String,
    pub(super) certificate: String,
    pub(super) key: String,
}

impl TlsFiles {
    /// Path of the file of this kind.
    pub(super) fn path(&self, file: TlsFile) -> &Path {
        match file {
            TlsFile::Authority => &self.authority,
            TlsFile::Certificate => &self.certificate,
            TlsFile::Key => &self.key,
        }
    }

    /// Reads the three files and checks that each has an item of its kind in the PEM format.
    pub fn read(&self) -> Result<TlsTexts, TlsError> {
        Ok(TlsTexts {
            authority: pem(&self.authority, TlsFile::Authority)?,
            certificate: pem(&self.certificate, TlsFile::Certificate)?,
            key: pem(&self.key, TlsFile::Key)?,
        })
    }
}

/// Reads a file that has an item of its kind.
fn pem(path: &Path, file: TlsFile) -> Result<String, TlsError> {
    let refuse = |reason: String| TlsError {
        file,
        path: path.to_owned(),
        reason,
    };
    let text = daemon::regular_file::read_text(path);
    let text = text.map_err(|error| {
        refuse(format!(
            "{error}; mount the Secret with the relay's certificates there"
        ))
    })?;
    let (label, what) = match file {
        TlsFile::Authority | TlsFile::Certificate => ("CERTIFICATE-----", "certificate"),
        TlsFile::Key => ("PRIVATE KEY-----", "private key"),
    };
    let begins = |line: &str| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(label);
    match text.lines().any(begins) {
        true => Ok(text),
        false => Err(refuse(format!(
            "there is no {what} in it; write one in the PEM format"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let files = TlsFiles {
            authority: file("ca.crt"),
            certificate: file("tls.crt"),
            key: file("tls.key"),
        };
        let refused = |reason: &str| {
            let error = files.read().err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
        };
        refused("ca.crt: No such file");
        std::fs::write(file("ca.crt"), "-----BEGIN CERTIFICATE-----\n").unwrap();
        std::fs::write(file("tls.crt"), "-----BEGIN PRIVATE KEY-----\n").unwrap();
        refused("tls.crt: there is no certificate in it");
        std::fs::write(file("tls.crt"), "-----BEGIN CERTIFICATE-----\n").unwrap();
        std::fs::write(file("tls.key"), "").unwrap();
        refused("tls.key: there is no private key in it");
        std::fs::write(file("tls.key"), "-----BEGIN EC PRIVATE KEY-----\n").unwrap();
        assert!(files.read().is_ok());
    }
}
