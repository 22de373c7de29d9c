//! Bytes of a journal file.
//!
//! ```text
//! header   magic 8, version u16, boot id 36, CRC-32 of these u32
//! record   length of the body u32, CRC-32 of the body u32, body
//! learned  1, endpoint u16, ifindex u32, protocol u8, seen at u64, TTL u32, kept for u32,
//!          client, server, server port u16, length u16 and name, count u16 and addresses
//! revoked  2, length u16 and name (empty: every name), count u16 and addresses (0: all)
//! ```
//! Integers are little endian; an address is its length (4 or 16) and its bytes.

use std::net::{IpAddr, SocketAddr};

use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping},
    name::Fqdn,
    rule::Transport,
};
use shared_maps::EndpointId;

const MAGIC: &[u8; 8] = b"HFSDPJNL";
/// Version of the format that this release writes.
const VERSION: u16 = 1;
/// Text form of a UUID.
const BOOT_ID: usize = 36;
/// Length of the header, bytes.
pub(super) const HEADER: usize = 8 + 2 + BOOT_ID + 4;
/// Maximum length of a body, in bytes: a name and the addresses of a message of 64 KiB.
const MAX_BODY: usize = 128 * 1024;
/// Maximum length of a name in presentation form, in bytes (RFC 1035, 2.3.4 and 5.1).
const MAX_NAME: usize = 1024;
/// Maximum number of addresses in one record.
const MAX_ADDRESSES: usize = 4096;

const LEARNED: u8 = 1;
const REVOKED: u8 = 2;

/// Why a file cannot be read as a journal of this boot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Shorter than a header, or not a journal, or its checksum is wrong.
    #[error("its header is damaged")]
    Damaged,
    /// The file is of a later release.
    #[error(
        "it has version {0}; this release reads up to {VERSION}: a proxy of that release adopts it"
    )]
    Newer(u16),
    /// The file is of another boot. Its addresses, interfaces and times are not valid.
    #[error("it is of an earlier boot")]
    OtherBoot,
}

/// One record of a journal file, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// A mapping, and the number of seconds from `seen_at` for which it counts (its TTL, or the
    /// minimum TTL).
    Learned(Mapping, u32),
    /// Revoked pairs. No name stands for all names, and no addresses for all addresses of the name.
    Revoked(Option<Fqdn>, Vec<IpAddr>),
}

/// The header of a file made during the boot `boot_id`.
pub(super) fn header(boot_id: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    let mut id = [b' '; BOOT_ID];
    for (to, from) in id.iter_mut().zip(boot_id.bytes()) {
        *to = from;
    }
    out.extend_from_slice(&id);
    let sum = crc32(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// Appends the record of a learned mapping, which counts for `kept_for` seconds from `seen_at`.
pub(super) fn put_learned(out: &mut Vec<u8>, mapping: &Mapping, kept_for: u32) {
    framed(out, |out| {
        out.push(LEARNED);
        out.extend_from_slice(&mapping.endpoint.id.0.to_le_bytes());
        out.extend_from_slice(&mapping.endpoint.ifindex.to_le_bytes());
        out.push(mapping.transport.number());
        out.extend_from_slice(&mapping.seen_at.nanos().to_le_bytes());
        out.extend_from_slice(&mapping.ttl.to_le_bytes());
        out.extend_from_slice(&kept_for.to_le_bytes());
        put_address(out, mapping.endpoint.client);
        put_address(out, mapping.server.ip());
        out.extend_from_slice(&mapping.server.port().to_le_bytes());
        put_names(out, mapping.name.as_str(), &mapping.addresses);
    });
}

/// Appends the record of a revocation. No name stands for all names, and no addresses for all
/// addresses of the name.
pub(super) fn put_revoked(out: &mut Vec<u8>, name: Option<&Fqdn>, addresses: &[IpAddr]) {
    framed(out, |out| {
        out.push(REVOKED);
        put_names(out, name.map_or("", Fqdn::as_str), addresses);
    });
}

fn framed(out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 8]);
    body(out);
    let written = out.get(start + 8..).unwrap_or_default();
    let length = u32::try_from(written.len()).unwrap_or(u32::MAX);
    let sum = crc32(written);
    if let Some(frame) = out.get_mut(start..start + 8) {
        let (first, second) = frame.split_at_mut(4);
        first.copy_from_slice(&length.to_le_bytes());
        second.copy_from_slice(&sum.to_le_bytes());
    }
}

fn put_names(out: &mut Vec<u8>, name: &str, addresses: &[IpAddr]) {
    out.extend_from_slice(&u16::try_from(name.len()).unwrap_or(u16::MAX).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
    let addresses = addresses.get(..MAX_ADDRESSES).unwrap_or(addresses);
    let count = u16::try_from(addresses.len()).unwrap_or(u16::MAX);
    out.extend_from_slice(&count.to_le_bytes());
    for address in addresses {
        put_address(out, *address);
    }
}

fn put_address(out: &mut Vec<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(v4) => {
            out.push(4);
            out.extend_from_slice(&v4.octets());
        }
        IpAddr::V6(v6) => {
            out.push(16);
            out.extend_from_slice(&v6.octets());
        }
    }
}

/// The records of a file, in the order in which they were written.
#[derive(Clone, Debug)]
pub(crate) struct Records<'a> {
    rest: &'a [u8],
    torn: bool,
}

/// Checks the header of a file and returns an iterator over its records. Fails if the file is
/// damaged, of a newer version or of another boot.
pub(crate) fn read<'a>(bytes: &'a [u8], boot_id: &str) -> Result<Records<'a>, HeaderError> {
    let Some((head, rest)) = bytes.split_at_checked(HEADER) else {
        return Err(HeaderError::Damaged);
    };
    let mut at = Cursor(head);
    let magic = at.take(MAGIC.len());
    let version = at.u16();
    let id = at.take(BOOT_ID);
    let (Some(magic), Some(version), Some(id), Some(sum)) = (magic, version, id, at.u32()) else {
        return Err(HeaderError::Damaged);
    };
    if magic != MAGIC {
        return Err(HeaderError::Damaged);
    }
    // Checked before the checksum, because a later release may define all that follows the version.
    if version > VERSION {
        return Err(HeaderError::Newer(version));
    }
    if sum != crc32(head.get(..HEADER - 4).unwrap_or_default()) {
        return Err(HeaderError::Damaged);
    }
    if id != boot_id.as_bytes() {
        return Err(HeaderError::OtherBoot);
    }
    Ok(Records { rest, torn: false })
}

impl Records<'_> {
    /// Whether reading ended at bytes that are no record: what a killed writer left, or damage.
    pub(crate) fn is_torn(&self) -> bool {
        self.torn
    }
}

impl Iterator for Records<'_> {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        if self.rest.is_empty() || self.torn {
            return None;
        }
        let mut at = Cursor(self.rest);
        let record = at.record();
        self.rest = at.0;
        self.torn = record.is_none();
        record
    }
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn record(&mut self) -> Option<Record> {
        let length = usize::try_from(self.u32()?).ok()?;
        let sum = self.u32()?;
        if length > MAX_BODY {
            return None;
        }
        let body = self.take(length)?;
        if sum != crc32(body) {
            return None;
        }
        let mut body = Cursor(body);
        match body.u8()? {
            LEARNED => body.learned(),
            REVOKED => {
                let (name, addresses) = body.names()?;
                Some(Record::Revoked(name, addresses))
            }
            _ => None,
        }
    }

    fn learned(&mut self) -> Option<Record> {
        let id = EndpointId(self.u16()?);
        let ifindex = self.u32()?;
        let transport = Transport::from_number(self.u8()?)?;
        let seen_at = BootTime::from_nanos(self.u64()?);
        let (ttl, kept_for) = (self.u32()?, self.u32()?);
        let client = self.address()?;
        let server = SocketAddr::new(self.address()?, self.u16()?);
        let (name, addresses) = self.names()?;
        let mapping = Mapping {
            endpoint: EndpointInstance {
                id,
                client,
                ifindex,
            },
            name: name?,
            addresses,
            ttl,
            seen_at,
            rcode: 0,
            server,
            transport,
            replayed: true,
        };
        Some(Record::Learned(mapping, kept_for))
    }

    fn names(&mut self) -> Option<(Option<Fqdn>, Vec<IpAddr>)> {
        let length = usize::from(self.u16()?);
        if length > MAX_NAME {
            return None;
        }
        let name = std::str::from_utf8(self.take(length)?).ok()?;
        let count = usize::from(self.u16()?);
        if count > MAX_ADDRESSES {
            return None;
        }
        let addresses = (0..count).map(|_| self.address());
        let addresses = addresses.collect::<Option<Vec<_>>>()?;
        let name = (!name.is_empty()).then(|| Fqdn::normalise(name));
        Some((name, addresses))
    }

    fn address(&mut self) -> Option<IpAddr> {
        match self.u8()? {
            4 => Some(<[u8; 4]>::try_from(self.take(4)?).ok()?.into()),
            16 => Some(<[u8; 16]>::try_from(self.take(16)?).ok()?.into()),
            _ => None,
        }
    }
}

/// CRC-32 as in IEEE 802.3. It detects torn and damaged writes, and is no defence against forgers.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        let [low, ..] = sum.to_le_bytes();
        let entry = TABLE.get(usize::from(low ^ byte)).copied();
        (sum >> 8) ^ entry.unwrap_or_default()
    };
    !bytes.iter().fold(!0, step)
}

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    let mut byte = 0;
    while index < table.len() {
        let mut sum: u32 = byte;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 {
                (sum >> 1) ^ 0xedb8_8320
            } else {
                sum >> 1
            };
            bit += 1;
        }
        table[index] = sum;
        index += 1;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mapping::pairs::tests::mapping;

    const BOOT: &str = "0d3f1c9e-53a1-4c0e-9d52-0123456789ab";

    fn file() -> Vec<u8> {
        let mut out = header(BOOT);
        put_learned(&mut out, &mapping("a.test.", &[1, 2], 60, 10), 90);
        put_revoked(&mut out, Some(&Fqdn::normalise("a.test.")), &[]);
        let mut six = mapping("b.test.", &[], 0, 11);
        six.addresses = vec!["2001:db8::1".parse().unwrap()];
        six.transport = Transport::Tcp;
        put_learned(&mut out, &six, 1);
        out
    }

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn written_state_is_read_back() {
        let bytes = file();
        let mut records = read(&bytes, BOOT).unwrap();
        let all: Vec<_> = records.by_ref().collect();
        assert!(!records.is_torn());
        let mut first = mapping("a.test.", &[1, 2], 60, 10);
        first.replayed = true;
        assert_eq!(all[0], Record::Learned(first, 90));
        let name = Fqdn::normalise("a.test.");
        assert_eq!(all[1], Record::Revoked(Some(name), vec![]));
        assert!(
            matches!(&all[2], Record::Learned(m, 1) if m.addresses[0].is_ipv6() && m.transport == Transport::Tcp)
        );
    }

    #[test]
    fn a_torn_tail_costs_only_itself() {
        let bytes = file();
        let whole = read(&bytes, BOOT).unwrap().count();
        let ends: Vec<usize> = {
            let mut records = read(&bytes, BOOT).unwrap();
            std::iter::from_fn(|| records.next().map(|_| bytes.len() - records.rest.len()))
                .collect()
        };
        for cut in HEADER..bytes.len() {
            let mut records = read(&bytes[..cut], BOOT).unwrap();
            let read = records.by_ref().count();
            assert!(read < whole);
            assert_eq!(read, ends.iter().filter(|end| **end <= cut).count());
            assert_eq!(records.is_torn(), cut != HEADER && !ends.contains(&cut));
        }
    }

    #[test]
    fn a_flipped_bit_is_found() {
        let bytes = file();
        let good: Vec<_> = read(&bytes, BOOT).unwrap().collect();
        for at in HEADER..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let mut records = read(&bad, BOOT).unwrap();
            let all: Vec<_> = records.by_ref().collect();
            assert!(records.is_torn(), "byte {at}");
            assert!(good.starts_with(&all), "byte {at}");
        }
    }

    #[test]
    fn other_files_are_distinguished() {
        let error = |bytes: &[u8], boot| read(bytes, boot).unwrap_err();
        let bytes = file();
        let other = "ffffffff-53a1-4c0e-9d52-0123456789ab";
        assert_eq!(error(&bytes, other), HeaderError::OtherBoot);
        assert_eq!(error(&bytes[..HEADER - 1], BOOT), HeaderError::Damaged);
        let mut newer = bytes.clone();
        newer[8] = 9;
        assert_eq!(error(&newer, BOOT), HeaderError::Newer(9));
        assert!(HeaderError::Newer(9).to_string().contains("version 9"));
        for at in (0..8).chain(10..HEADER) {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(error(&bad, BOOT), HeaderError::Damaged, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(tail in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = header(BOOT);
            bytes.extend(&tail);
            let mut records = read(&bytes, BOOT).unwrap();
            let number = records.by_ref().count();
            prop_assert!(number <= tail.len() / 9);
        }

        #[test]
        fn any_mapping_is_read_back(
            id: u16, ifindex: u32, tcp: bool, seen: u64, ttl: u32, kept_for: u32, port: u16,
            client: IpAddr, server: IpAddr, name in "([a-z0-9-]|\\\\\\.|\\.){1,40}",
            addresses in proptest::collection::vec(any::<IpAddr>(), 0..5),
        ) {
            let mapping = Mapping {
                endpoint: EndpointInstance { id: EndpointId(id), client, ifindex },
                name: Fqdn::normalise(&name),
                addresses,
                ttl,
                seen_at: BootTime::from_nanos(seen),
                rcode: 0,
                server: SocketAddr::new(server, port),
                transport: if tcp { Transport::Tcp } else { Transport::Udp },
                replayed: true,
            };
            let mut bytes = header(BOOT);
            put_learned(&mut bytes, &mapping, kept_for);
            let all: Vec<_> = read(&bytes, BOOT).unwrap().collect();
            prop_assert_eq!(all, vec![Record::Learned(mapping, kept_for)]);
        }
    }
}
