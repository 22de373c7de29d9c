//! Stands in for the client and the relays in a build without the feature `kubernetes`.

/// Stands in for the client.
pub mod api {
    /// Stands in for the client.
    pub mod client {
        use tokio_util::{sync::CancellationToken, task::TaskTracker};

        use crate::{ApiSettings, Here, Watches};

        /// Why no API server can be used.
        #[derive(Debug, thiserror::Error)]
        pub enum ClientError {
            #[error(
                "this program was built without the feature kubernetes, and has neither --kubernetes nor \
                 the command relay; build it with `cargo build -p holdfast-agent --features kubernetes`"
            )]
            NotBuilt,
        }

        /// A client of the API server; there is none.
        #[derive(Clone, Debug)]
        pub enum Api {}

        impl Api {
            /// Refuses: there is no client.
            ///
            /// # Errors
            /// Always [`ClientError::NotBuilt`].
            pub async fn connect(_: &ApiSettings) -> Result<Self, ClientError> {
                Err(ClientError::NotBuilt)
            }

            /// Never called, because there is no value.
            pub fn server(&self) -> &str {
                match *self {}
            }

            /// Never called, because there is no value.
            pub fn namespace(&self) -> &str {
                match *self {}
            }

            /// Never called, because there is no value.
            pub fn authorities(&self) -> &[String] {
                match *self {}
            }
        }

        /// Starts nothing: there is no client.
        pub fn start(api: &Api, _: Here, _: &TaskTracker, _: &CancellationToken) -> Watches {
            match *api {}
        }
    }

    /// Stands in for the DaemonSet's watch.
    pub mod own_set {
        use super::client::Api;

        /// The DaemonSet of the agent; no value exists in this build.
        #[derive(Debug)]
        pub enum OwnSet {}

        impl OwnSet {
            /// Finds nothing: there is no client to look with.
            #[expect(
                clippy::needless_pass_by_value,
                reason = "the same arguments as with the feature"
            )]
            pub fn start(api: Api, _: &str) -> Self {
                match api {}
            }

            /// Never called, because there is no value.
            pub async fn was_deleted(self) -> bool {
                match self {}
            }
        }
    }

    /// Stands in for the startup taint.
    pub mod startup_taint {
        use tokio_util::sync::CancellationToken;

        use super::client::Api;
        use crate::health::ClusterHealth;

        /// The startup taint of this node; no value exists in this build.
        #[derive(Debug)]
        pub struct StartupTaint {
            /// No value exists in this build.
            pub api: Api,
            pub node: String,
            pub key: String,
            /// Nothing is reported without a client.
            pub health: ClusterHealth,
        }

        impl StartupTaint {
            /// Never called, because there is no value.
            pub async fn run(self, _: impl Future<Output = bool>, _: CancellationToken) {
                match self.api {}
            }
        }
    }
}

/// Stands in for relays.
pub mod relay {
    /// Stands in for the relays' certificates.
    pub mod credentials {
        use crate::relay_settings::{TlsError, TlsFiles};

        /// Checks only that the files can be read and are in the PEM format.
        pub fn check(files: &TlsFiles) -> Result<(), TlsError> {
            files.read().map(drop)
        }
    }

    /// Stands in for the relays' start.
    pub mod start {
        use tokio_util::{sync::CancellationToken, task::TaskTracker};

        use crate::{
            Here, Watches,
            api::client::{Api, ClientError},
            relay_settings::{RelayConfig, RelaySettings},
        };

        /// Refuses: there is no client.
        ///
        /// # Errors
        /// Always [`ClientError::NotBuilt`].
        pub async fn run(_: RelayConfig) -> anyhow::Result<()> {
            Err(ClientError::NotBuilt.into())
        }

        /// Starts nothing: there is no client.
        pub fn follow(
            api: &Api,
            _: RelaySettings,
            _: Here,
            _: &TaskTracker,
            _: &CancellationToken,
        ) -> Watches {
            match *api {}
        }
    }
}
