//! Moves a node from `netpol run` to `run`, and removes the table.

use std::time::Duration;

use agent_datapath::nf_tables::{Connection, NftablesError};
use netpol::render::{
    change::Change,
    nft::TABLE,
    ruleset::{Table, TableFamily},
};
use tokio_util::sync::CancellationToken;

use crate::netns_lock;

/// Pause between two checks whether `netpol run` has ended.
const POLL: Duration = Duration::from_secs(2);

/// Deletes the tables. Returns whether one was there.
///
/// # Errors
/// The kernel cannot be asked, or refuses.
pub(crate) fn remove_table() -> Result<bool, NftablesError> {
    let mut kernel = Connection::open()?;
    let mut deletions = Vec::new();
    for family in [TableFamily::Inet, TableFamily::Bridge] {
        if kernel.difference(&Table::of(family, TABLE))?.is_some() {
            deletions.push(Change::deletion(family, TABLE));
        }
    }
    kernel.commit(&deletions)?;
    Ok(!deletions.is_empty())
}

/// Deletes the table once `in_force` ends with true (the programs of `run` enforce the policies), and no `netpol run`
/// runs any more.
pub(crate) async fn take_over(in_force: impl Future<Output = bool>, stop: CancellationToken) {
    let taken = async {
        if !in_force.await {
            return;
        }
        let mut known = None;
        loop {
            match try_to_remove() {
                Ok(Some(was_there)) => {
                    if was_there {
                        tracing::info!(
                            "the nftables table of `netpol run` is deleted: programs enforce its policies now"
                        );
                    }
                    return;
                }
                Ok(None) => {}
                Err(error) => {
                    let error = error.to_string();
                    if known.as_ref() != Some(&error) {
                        tracing::warn!(
                            error,
                            "cannot delete the nftables table of `netpol run`: if there is one, its last \
                             policies stay in force beside these; tried again"
                        );
                    }
                    known = Some(error);
                }
            }
            tokio::time::sleep(POLL).await;
        }
    };
    stop.run_until_cancelled(taken).await;
}

/// Whether the table was there; `None` while `netpol run` runs.
fn try_to_remove() -> anyhow::Result<Option<bool>> {
    match netns_lock::has_netpol()? {
        true => Ok(None),
        false => Ok(Some(remove_table()?)),
    }
}
