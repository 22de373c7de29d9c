//! How a query that policy does not allow is answered.

/// Response code for names that policy does not allow (`--tofqdns-dns-reject-response-code`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RejectCode {
    /// REFUSED (5). Search lists of musl and c-ares stop at it.
    Refused,
    /// NXDOMAIN (3) with an SOA record. Search lists go on.
    #[value(name = "nameError", aliases = ["nxdomain", "nameerror"])]
    NameError,
}
