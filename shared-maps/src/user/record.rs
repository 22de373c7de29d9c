//! Types that may cross the system call boundary as bytes.

use crate::{
    conntrack::{CtKey4, CtKey6, CtValue},
    endpoint::EndpointConfig,
    event::{Counter, Event},
    fragment::{FragmentKey, FragmentValue},
    ipcache::{IpcacheKey, IpcacheValue, IpcacheValueV1},
    lxc::{LxcKey, LxcValue},
    policy::{PolicyKey, PolicyValue},
    policystats::{PolicyStatsKey, PolicyStatsValue},
    quota::QuotaKey,
    redirect::{RedirectKey, RedirectValue},
    sources::{SourceKey, SourceValue},
    steering::Slot,
    tunnel::TunnelConfig,
    world::WorldKey,
};

/// A map key or value.
///
/// # Safety
/// The type has no padding bytes, every bit pattern is a valid value, and it
/// holds no pointers.
pub unsafe trait Record: Copy + Default + Send + Sync + 'static {
    /// The bytes as they are in the map.
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: `Self: Record` has no padding, so all its bytes are initialised.
        unsafe { core::slice::from_raw_parts(core::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// Reads a value from the start of `bytes`. `None` if there are too few bytes.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < size_of::<Self>() {
            return None;
        }
        // SAFETY: the length was checked and every bit pattern is valid.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

macro_rules! record {
    ($($type:ty),* $(,)?) => {
        // SAFETY: `layout` checks that the fields of each type fill its size
        // with explicit padding, and all fields are integers or byte arrays.
        $(unsafe impl Record for $type {})*
    };
}

record!(
    u8,
    u32,
    u64,
    LxcKey,
    LxcValue,
    IpcacheKey,
    IpcacheValue,
    IpcacheValueV1,
    PolicyKey,
    PolicyValue,
    PolicyStatsKey,
    PolicyStatsValue,
    QuotaKey,
    CtKey4,
    CtKey6,
    CtValue,
    FragmentKey,
    FragmentValue,
    RedirectKey,
    RedirectValue,
    Slot,
    EndpointConfig,
    Event,
    Counter,
    WorldKey,
    SourceKey,
    SourceValue,
    TunnelConfig,
);
