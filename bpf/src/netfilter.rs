//! The kernel's own connection tracking, in which a packet's source is as it was before the node
//! translated it.
//!
//! No helper gives it to a program. The agent has the places of the fields from the kernel's type
//! information, and this module reads them without write access: `bpf_probe_read_kernel` fails
//! where an address is not valid, and never faults.

use aya_ebpf::{Global, helpers::bpf_probe_read_kernel, programs::TcContext};
use shared_maps::{FAMILY_IPV4, netfilter::Layout};

use crate::address::Address;

/// [`Layout`], set by the loader; 0: the fields cannot be read here, and the code that reads them
/// is not even verified.
#[unsafe(no_mangle)]
static CONNTRACK_LAYOUT: Global<u32> = Global::new(0);

/// `IP_CT_IS_REPLY`: this state and later ones are of packets in the direction of replies.
const REPLY: u64 = 3;
/// `NFCT_INFOMASK`: the state is in the low bits of the entry's address.
const STATE: u64 = 7;

/// Source of the packet's flow in the packet's direction before any translation. `None` if the
/// kernel does not track the packet.
#[inline(never)]
pub(crate) fn source(ctx: &TcContext, family: u8) -> Option<Address> {
    let layout = CONNTRACK_LAYOUT.load();
    if layout == 0 {
        return None;
    }
    let layout = Layout::unpack(layout);
    // To the kernel, a program's context is the `struct sk_buff`.
    let packet = ctx.skb.skb as u64;
    // SAFETY: the helper checks the address.
    let tracked: u64 =
        unsafe { bpf_probe_read_kernel((packet + u64::from(layout.entry)) as *const u64).ok()? };
    let entry = tracked & !STATE;
    if entry == 0 {
        return None;
    }
    let direction = u64::from(tracked & STATE >= REPLY);
    let at = entry + u64::from(layout.source) + direction * u64::from(layout.direction);
    // SAFETY: as above.
    let source: [u32; 4] = unsafe { bpf_probe_read_kernel(at as *const [u32; 4]).ok()? };
    Some(if family == FAMILY_IPV4 {
        Address([source[0], 0, 0, 0])
    } else {
        Address(source)
    })
}
