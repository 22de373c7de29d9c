//! The order in which entries of a policy map are set.

use shared_maps::{
    IdentityId,
    policy::{PolicyKey, PolicyValue},
};

use super::tier::is_of_table;

/// Order in which entries are set; they are removed in the reverse. Entries of tables come before all
/// others, longest prefix first. The deny of a Service is for all of its ports, except those with an
/// entry: such entries come before the deny.
pub(crate) fn set_order(key: &PolicyKey, value: &PolicyValue) -> u8 {
    if is_of_table(value) {
        LONGEST - key.lpm_len().min(LONGEST)
    } else if value.is_deny() {
        LAST - 2
    } else if IdentityId(key.sec_label).is_service() {
        LAST - 3
    } else if value.proxy_port != shared_maps::Be16::ZERO {
        LAST - 1
    } else {
        LAST
    }
}

/// Bits of protocol and port.
const LONGEST: u8 = 24;

/// Rank of the entries that are set last.
pub(crate) const LAST: u8 = LONGEST + 4;
