//! `--metrics-address`, of agents and relays.

use std::net::SocketAddr;

use super::ConfigError;

/// Address of metrics and health; `None` = off.
pub(super) fn metrics_address(text: &str) -> Result<Option<SocketAddr>, ConfigError> {
    match text {
        "" | "off" => Ok(None),
        text => parse_address(text).map(Some),
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, ConfigError> {
    let full = if text.starts_with(':') {
        format!("127.0.0.1{text}")
    } else {
        text.to_owned()
    };
    full.parse().map_err(|_| ConfigError {
        flag: "metrics-address",
        reason: format!("{text:?} is neither ADDRESS:PORT nor :PORT (\"off\" turns it off)"),
    })
}
