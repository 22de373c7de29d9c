//! Whether addresses that authors of Services write are judged as the Service: `--k8s-external-ips`.

/// What `spec.externalIPs` of Services mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ExternalIps {
    /// The address is the Service's, at every port: its other ports are closed to restricted
    /// endpoints
    #[default]
    Judge,
    /// The address stays what it is without the Service; nodes translate it all the same, so a pod
    /// that may send to it reaches the Service's pods
    Refuse,
}
