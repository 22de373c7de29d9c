//! Zone transfers over TCP: questions that are answered by many messages (RFC 1995, RFC 5936).

use super::{HEADER_LEN, Header, Record, TYPE_SOA, labels, u16_at, u32_at};

/// Type IXFR (RFC 1995).
const TYPE_IXFR: u16 = 251;
/// Type AXFR (RFC 5936).
const TYPE_AXFR: u16 = 252;

/// How far a transfer has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// Number of SOA records that have arrived.
    soas: u64,
    /// Serial of the first SOA record.
    serial: u32,
}

impl Transfer {
    /// `None` if `question` (name, type, class) does not request a transfer.
    pub fn of(question: &[u8]) -> Option<Self> {
        let qtype = u16_at(question, question.len().checked_sub(4)?)?;
        [TYPE_IXFR, TYPE_AXFR].contains(&qtype).then(Self::default)
    }

    /// Whether the first SOA record has arrived.
    pub fn has_begun(self) -> bool {
        self.soas > 0
    }

    /// Whether `message` may be a later message of the transfer. Only the first message must repeat
    /// the question; servers may omit it from the others (RFC 5936, 2.2.1).
    pub fn continues(self, message: &[u8]) -> bool {
        Header::read(message).is_some_and(|h| {
            self.has_begun() && h.is_response() && h.opcode() == 0 && h.questions == 0
        })
    }

    /// Reads the next message of the transfer, and returns whether it is the last one. A message is
    /// the last one if it is an error, cannot be read, comes before any SOA, or has the final SOA.
    ///
    /// The final SOA repeats the serial of the first one, and its position among all SOAs is even.
    /// In a transfer of a whole zone it is the second SOA. In a transfer of changes, each change
    /// has two SOAs: the SOA of the old version at an even position, and the SOA of the new version
    /// at an odd one.
    ///
    /// An IXFR answer of one SOA ("no changes") looks like the beginning of a transfer: the result is false.
    pub fn take(&mut self, message: &[u8]) -> bool {
        self.read(message).unwrap_or(true)
    }

    fn read(&mut self, message: &[u8]) -> Option<bool> {
        let header = Header::read(message)?;
        if header.rcode() != 0 {
            return Some(true);
        }
        let mut at = HEADER_LEN;
        for _ in 0..header.questions {
            at = labels::skip_plain(message, at)? + 4;
        }
        for _ in 0..header.answers {
            let (record, next) = Record::read(message, at)?;
            at = next;
            if record.rtype != TYPE_SOA {
                continue;
            }
            // After the two names come five numbers; the serial is the first.
            let serial = u32_at(message, next.checked_sub(20)?)?;
            if self.soas == 0 {
                self.serial = serial;
            }
            self.soas += 1;
            if self.soas.is_multiple_of(2) && serial == self.serial {
                return Some(true);
            }
        }
        Some(!self.has_begun())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{put_u16, query::tests::plain};

    /// A message with an SOA of each serial; 0 stands for another record.
    fn message(serials: &[u32]) -> Vec<u8> {
        let mut message = plain(1, "x", TYPE_AXFR);
        put_u16(&mut message, 2, 0x8400);
        put_u16(&mut message, 6, u16::try_from(serials.len()).unwrap());
        for serial in serials {
            let rtype = if *serial == 0 { 1 } else { TYPE_SOA };
            message.extend_from_slice(&[0xc0, 12]);
            message.extend_from_slice(&rtype.to_be_bytes());
            message.extend_from_slice(&[0, 1, 0, 0, 0, 9, 0, 22, 0, 0]);
            message.extend_from_slice(&serial.to_be_bytes());
            message.extend_from_slice(&[0; 16]);
        }
        message
    }

    fn last(messages: &[&[u32]]) -> Option<usize> {
        let mut transfer = Transfer::default();
        messages.iter().position(|m| transfer.take(&message(m)))
    }

    #[test]
    fn the_end_is_seen() {
        assert_eq!(last(&[&[9, 0, 0], &[0, 0], &[0, 9]]), Some(2));
        assert_eq!(last(&[&[9], &[0], &[9], &[9]]), Some(2));
        // Two sets of changes, cut into messages anywhere.
        let changes = [9, 7, 0, 8, 0, 8, 0, 0, 9, 0, 9];
        assert_eq!(last(&[&changes]), Some(0));
        for cut in 1..changes.len() {
            assert_eq!(last(&[&changes[..cut], &changes[cut..]]), Some(1), "{cut}");
        }
        assert_eq!(last(&[&changes[..10]]), None);
    }

    #[test]
    fn an_answer_that_is_not_a_transfer_ends_at_once() {
        assert_eq!(last(&[&[0]]), Some(0));
        let mut refused = message(&[9]);
        put_u16(&mut refused, 2, 0x8405);
        assert!(Transfer::default().take(&refused));
        let mut cut = message(&[9]);
        cut.pop();
        assert!(Transfer::default().take(&cut));
    }
}
