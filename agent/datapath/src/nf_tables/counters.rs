//! The counters of a table.

use std::collections::BTreeMap;

use netpol::render::ruleset::TableFamily;

use super::{
    NftablesError,
    attribute::find,
    message::{Kind, OBJECT_DATA, OF_TABLE, TableName},
    socket::{Netfilter, Object},
};

/// `NFTA_COUNTER_PACKETS`.
const PACKETS: u16 = 2;

/// Packets that each counter of the table has counted since it was made.
pub(super) fn read(
    netfilter: &mut Netfilter,
    family: TableFamily,
    table: &str,
) -> Result<BTreeMap<String, u64>, NftablesError> {
    let name = TableName(family.into(), table);
    let objects = netfilter.list(&name.list(Kind::Counter))?;
    let ours = objects
        .iter()
        .filter(|object| object.text(OF_TABLE) == Some(table));
    Ok(ours.filter_map(counter).collect())
}

fn counter(object: &Object) -> Option<(String, u64)> {
    let packets = find(object.value(OBJECT_DATA)?, PACKETS)?;
    let packets = u64::from_be_bytes(packets.try_into().ok()?);
    Some((object.text(Kind::Counter.name())?.to_owned(), packets))
}
