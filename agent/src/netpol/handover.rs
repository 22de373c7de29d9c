//! The way of a node from `netpol run` to `run`, and the removal of the table.

use std::time::Duration;

use agent_datapath::nf_tables::{Connection, Difference, NftablesError};
use netpol::render::{change::Change, nft::TABLE, ruleset::Table};
use tokio_util::sync::CancellationToken;

use crate::netns_lock;

/// Between two looks whether `netpol run` has ended.
const POLL: Duration = Duration::from_secs(2);

/// Deletes the table. Gives whether it was there.
///
/// # Errors
/// The kernel cannot be asked, or refuses.
pub(crate) fn remove_table() -> Result<bool, NftablesError> {
    let mut kernel = Connection::open()?;
    let difference = kernel.difference(&Table::new(TABLE))?;
    let was_there = difference != Some(Difference::NoTable);
    if was_there {
        kernel.commit(&Change::deletion(TABLE))?;
    }
    Ok(was_there)
}

/// Deletes the table once `in_force` ends with true, which says that the programs of `run` enforce the
/// policies, and no `netpol run` runs any more.
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

/// Whether the table was there; none while `netpol run` runs.
fn try_to_remove() -> anyhow::Result<Option<bool>> {
    match netns_lock::has_netpol()? {
        true => Ok(None),
        false => Ok(Some(remove_table()?)),
    }
}
