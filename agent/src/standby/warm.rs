//! What a standby prepares while it waits.

use agent_datapath::warm::Warm;

use super::on_thread;
use crate::config::Config;

/// Loads the programs ahead. Without them the takeover takes longer, and that is all.
pub(super) async fn load(config: &Config) -> Option<Warm> {
    let mut kernel = config.kernel();
    // The spelling that the owner of the root has.
    kernel.bpf_root = std::fs::canonicalize(&kernel.bpf_root).ok()?;
    match on_thread(move || Warm::load(&kernel)).await {
        Ok(Ok(warm)) => Some(warm),
        Ok(Err(error)) => {
            tracing::warn!(%error, "the programs are not loaded ahead: the takeover takes longer");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the programs are not loaded ahead: the takeover takes longer");
            None
        }
    }
}
