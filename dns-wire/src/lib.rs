//! DNS messages, read in place and never re-encoded (RFC 1035, 4). No input or output.
//!
//! The proxy reads every query and answer with this crate, and the agent's resolver reads its own answers.

pub mod answer;
pub mod edns;
pub mod labels;
pub mod query;
pub mod reply;
pub mod transfer;

/// Size of the header, bytes.
pub const HEADER_LEN: usize = 12;

/// Flag QR: a response.
pub(crate) const FLAG_RESPONSE: u16 = 0x8000;
pub(crate) const MASK_OPCODE: u16 = 0x7800;
/// Flag TC: truncated.
pub(crate) const FLAG_TRUNCATED: u16 = 0x0200;
/// Flag RD: recursion desired.
pub(crate) const FLAG_RECURSION_DESIRED: u16 = 0x0100;
/// Flag CD: checking disabled (RFC 4035, 3.1.6).
pub(crate) const FLAG_CHECKING_DISABLED: u16 = 0x0010;
/// Mask of the response code.
pub(crate) const MASK_RCODE: u16 = 0x000f;

pub const TYPE_A: u16 = 1;
pub(crate) const TYPE_CNAME: u16 = 5;
pub(crate) const TYPE_SOA: u16 = 6;
/// Record type AAAA (RFC 3596).
pub const TYPE_AAAA: u16 = 28;
/// Record type OPT (RFC 6891, 6.1).
pub(crate) const TYPE_OPT: u16 = 41;
pub(crate) const CLASS_IN: u16 = 1;

/// Response codes of the proxy's own replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rcode {
    /// The query cannot be read.
    FormErr,
    /// We or the server failed.
    ServFail,
    /// The name does not exist.
    NxDomain,
    /// This kind of query is not served.
    NotImp,
    /// Policy does not allow the query.
    Refused,
    /// EDNS of a version that we do not know (RFC 6891, 9).
    BadVers,
}

impl Rcode {
    /// Number; its upper bits go into the OPT record (RFC 1035, 4.1.1; RFC 6891, 6.1.3).
    pub const fn number(self) -> u16 {
        match self {
            Self::FormErr => 1,
            Self::ServFail => 2,
            Self::NxDomain => 3,
            Self::NotImp => 4,
            Self::Refused => 5,
            Self::BadVers => 16,
        }
    }
}

/// The fixed header of 12 bytes (RFC 1035, 4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub id: u16,
    /// Flags, opcode and response code.
    pub flags: u16,
    /// Entries of the question section.
    pub questions: u16,
    /// Records of the answer section.
    pub answers: u16,
    /// Records of the authority section.
    pub authorities: u16,
    /// Records of the additional section.
    pub additionals: u16,
}

impl Header {
    /// Reads the header, if the message is long enough.
    #[inline]
    pub fn read(message: &[u8]) -> Option<Self> {
        Some(Self {
            id: u16_at(message, 0)?,
            flags: u16_at(message, 2)?,
            questions: u16_at(message, 4)?,
            answers: u16_at(message, 6)?,
            authorities: u16_at(message, 8)?,
            additionals: u16_at(message, 10)?,
        })
    }

    #[inline]
    pub const fn is_response(self) -> bool {
        self.flags & FLAG_RESPONSE != 0
    }

    /// Opcode, 0 to 15; 0 is QUERY.
    #[inline]
    pub const fn opcode(self) -> u16 {
        (self.flags & MASK_OPCODE) >> 11
    }

    /// Response code without its EDNS extension.
    #[inline]
    pub const fn rcode(self) -> u16 {
        self.flags & MASK_RCODE
    }
}

/// A resource record, by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Start of the owner name.
    pub(crate) owner: usize,
    pub(crate) rtype: u16,
    pub(crate) class: u16,
    /// TTL, or the extended flags of an OPT record.
    pub(crate) ttl: u32,
    /// Offset of the data in the message.
    pub(crate) data: usize,
    pub(crate) data_len: usize,
}

impl Record {
    /// Reads the record at `at`. Also returns where the next record starts.
    pub(crate) fn read(message: &[u8], at: usize) -> Option<(Self, usize)> {
        let fixed = labels::skip(message, at)?;
        let data_len = usize::from(u16_at(message, fixed + 8)?);
        let data = fixed + 10;
        let end = data + data_len;
        if end > message.len() {
            return None;
        }
        let record = Self {
            owner: at,
            rtype: u16_at(message, fixed)?,
            class: u16_at(message, fixed + 2)?,
            ttl: u32_at(message, fixed + 4)?,
            data,
            data_len,
        };
        Some((record, end))
    }
}

/// Big-endian number at offset `at`; `None` if the message ends before it.
#[inline]
pub fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    let bytes = message.get(at..)?.first_chunk::<2>()?;
    Some(u16::from_be_bytes(*bytes))
}

/// Big-endian number at offset `at`; `None` if the message ends before it.
pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    let bytes = message.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_be_bytes(*bytes))
}

/// Overwrites the number at `at`, if it is there.
pub(crate) fn put_u16(message: &mut [u8], at: usize, value: u16) {
    if let Some(slot) = message.get_mut(at..).and_then(|m| m.first_chunk_mut::<2>()) {
        *slot = value.to_be_bytes();
    }
}

/// Overwrites the message id. A message without room for an id stays as it is.
#[inline]
pub fn set_id(message: &mut [u8], id: u16) {
    put_u16(message, 0, id);
}
