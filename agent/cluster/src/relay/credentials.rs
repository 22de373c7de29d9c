//! Certificate, key and authority of one side, as a handshake of TLS needs them.
//!
//! Only files that belong together become credentials: a Secret may be replaced between two reads.

use std::{fmt, sync::Arc};

use tokio_rustls::rustls::{
    Error, InconsistentKeys, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject as _},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::CertifiedKey,
};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::relay_settings::{TlsError, TlsFile, TlsFiles, TlsTexts};

/// Protocol of gRPC, as TLS names it.
const HTTP2: &[u8] = b"h2";

/// Checks that a connection can be made with the files.
pub fn check(files: &TlsFiles) -> Result<(), TlsError> {
    Credentials::load(files).map(drop)
}

/// The credentials of one side, checked and ready for handshakes.
pub(crate) struct Credentials {
    texts: TlsTexts,
    server: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Credentials")
    }
}

impl Credentials {
    /// Reads and checks the files.
    pub(super) fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        Self::of(files, files.read()?)
    }

    /// The credentials of the files, if the files have changed; `None` if they have not.
    pub(super) fn renewed(&self, files: &TlsFiles) -> Result<Option<Self>, TlsError> {
        let texts = files.read()?;
        match texts == self.texts {
            true => Ok(None),
            false => Self::of(files, texts).map(Some),
        }
    }

    fn of(files: &TlsFiles, texts: TlsTexts) -> Result<Self, TlsError> {
        let refuse = |file: TlsFile, reason: String| TlsError {
            file,
            path: files.path(file).to_owned(),
            reason,
        };
        let provider = Arc::new(ring::default_provider());
        let chain = certificates(&texts.certificate)
            .map_err(|reason| refuse(TlsFile::Certificate, reason))?;
        let roots =
            certificates(&texts.authority).map_err(|reason| refuse(TlsFile::Authority, reason))?;
        let key = PrivateKeyDer::from_pem_slice(texts.key.as_bytes()).map_err(|error| {
            refuse(
                TlsFile::Key,
                format!("{error}; write a private key in the PEM format"),
            )
        })?;
        check_pair(files, &chain, &key, &provider)?;
        let verifier = verifier(roots, &provider).map_err(|reason| {
            refuse(
                TlsFile::Authority,
                format!("{reason}; write the certificate of the authority in the PEM format"),
            )
        })?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map(|builder| builder.with_client_cert_verifier(Arc::clone(&verifier)))
            .and_then(|builder| builder.with_single_cert(chain, key))
            .map_err(|error| refuse(TlsFile::Certificate, error.to_string()))?;
        Ok(Self {
            texts,
            server: Arc::new(for_relays(server)),
            verifier,
        })
    }

    pub(super) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// The TLS settings of a connection to a relay.
    pub(super) fn client(&self, server_name: &str) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.texts.authority))
            .identity(Identity::from_pem(&self.texts.certificate, &self.texts.key))
            .domain_name(server_name)
    }

    /// Whether the authority signed these certificates. The other side has shown them.
    pub(super) fn accepts(&self, chain: &[CertificateDer<'static>], now: UnixTime) -> bool {
        let Some((first, others)) = chain.split_first() else {
            return false;
        };
        let verified = self.verifier.verify_client_cert(first, others, now);
        verified.is_ok()
    }

    /// Whether both accept the same certificates.
    pub(super) fn has_authority_of(&self, other: &Self) -> bool {
        self.texts.authority == other.texts.authority
    }
}

/// No session is resumed: each connection shows a certificate that the authority signed.
fn for_relays(mut server: ServerConfig) -> ServerConfig {
    server.alpn_protocols = vec![HTTP2.to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    server
}

fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    match read {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => Err("there is no certificate in it; write one in the PEM format".to_owned()),
        Err(error) => Err(format!("{error}; write a certificate in the PEM format")),
    }
}

fn check_pair(
    files: &TlsFiles,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<(), TlsError> {
    let refuse = |file: TlsFile, reason: String| TlsError {
        file,
        path: files.path(file).to_owned(),
        reason,
    };
    let signing = provider.key_provider.load_private_key(key.clone_key());
    let signing = signing.map_err(|error| {
        let reason = format!("{error}; write an ECDSA, Ed25519 or RSA key in the PEM format");
        refuse(TlsFile::Key, reason)
    })?;
    match CertifiedKey::new(chain.to_vec(), signing).keys_match() {
        Ok(()) | Err(Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(()),
        Err(Error::InconsistentKeys(_)) => Err(refuse(
            TlsFile::Certificate,
            format!(
                "it is not the certificate of the private key in {}; write a certificate and a key \
                 that belong together",
                files.key.display()
            ),
        )),
        Err(error) => Err(refuse(
            TlsFile::Certificate,
            format!("{error}; write a certificate in the PEM format"),
        )),
    }
}

fn verifier(
    roots: Vec<CertificateDer<'static>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut store = RootCertStore::empty();
    for root in roots {
        store.add(root).map_err(|error| error.to_string())?;
    }
    let builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider));
    builder.build().map_err(|error| error.to_string())
}
