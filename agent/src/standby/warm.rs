//! What a standby prepares while it waits.

use agent_datapath::warm::Warm;

use super::on_thread;
use crate::config::Config;

/// Loads the programs ahead. Without them the takeover takes longer, and that is all.
pub(super) async fn load(config: &Config) -> Result<Warm, String> {
    let loaded = try_load(config).await;
    if let Err(error) = &loaded {
        tracing::warn!(%error, "the programs are not loaded ahead: the takeover takes longer");
    }
    loaded
}

async fn try_load(config: &Config) -> Result<Warm, String> {
    let mut kernel = config.kernel();
    // The spelling that the owner of the root has.
    let root = std::fs::canonicalize(&kernel.bpf_root);
    kernel.bpf_root = root.map_err(|error| error.to_string())?;
    let loaded = on_thread(move || Warm::load(&kernel)).await;
    let loaded = loaded.map_err(|error| error.to_string())?;
    loaded.map_err(|error| error.to_string())
}
