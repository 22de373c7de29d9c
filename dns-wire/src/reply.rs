//! Answers that we give ourselves.

use super::{
    FLAG_CHECKING_DISABLED, FLAG_RECURSION_DESIRED, FLAG_RESPONSE, HEADER_LEN, Header, MASK_OPCODE,
    MASK_RCODE, Rcode, TYPE_OPT, TYPE_SOA, edns, labels, query::Query,
};

/// Extended DNS error Blocked: the operator's own policy forbids the name (RFC 8914, 4.16).
pub const EDE_BLOCKED: u16 = 15;
/// Extended DNS error Prohibited: the client may not ask here (RFC 8914, 4.19).
pub const EDE_PROHIBITED: u16 = 18;
/// Extended DNS error Network Error (RFC 8914, 4.24).
pub(crate) const EDE_NETWORK: u16 = 23;

/// UDP payload size that our OPT records announce, bytes.
const UDP_SIZE: u16 = 1232;
/// Option Extended DNS Error (RFC 8914).
const OPTION_EDE: u16 = 15;
/// Seconds that a synthesised NXDOMAIN may be cached (RFC 2308, 5).
const NEGATIVE_TTL: u32 = 5;

/// Answers `query` with `code`. The question is echoed. If the client knows EDNS, the answer has an
/// OPT record, with the extended error if there is one. A cookie with a server part comes back as
/// it is, because a client that expects one drops an answer without a cookie (RFC 7873, 5.3).
pub fn to_query(query: &Query<'_>, code: Rcode, extended_error: Option<u16>, out: &mut Vec<u8>) {
    out.clear();
    header(query.header, code, out);
    count(out, 4, 1);
    out.extend_from_slice(query.question());
    if code == Rcode::NxDomain {
        count(out, 8, 1);
        soa(query, out);
    }
    if let Some(edns) = &query.edns {
        count(out, 10, 1);
        let cookie = edns.cookie(query.message);
        opt(edns.dnssec_ok, code, extended_error, cookie, out);
    }
}

/// Answers a message that has a header, but is no query to judge. The question is echoed if it can be read; EDNS is
/// answered with EDNS if it can be found (RFC 6891, 6.1.1 and 7). Nothing is written if there is no header.
pub fn to_unfit(message: &[u8], code: Rcode, out: &mut Vec<u8>) {
    out.clear();
    let Some(received) = Header::read(message) else {
        return;
    };
    header(received, code, out);
    let question = (received.questions == 1)
        .then(|| labels::skip_plain(message, HEADER_LEN))
        .flatten()
        .and_then(|name_end| message.get(HEADER_LEN..name_end + 4));
    if let Some(question) = question {
        count(out, 4, 1);
        out.extend_from_slice(question);
    }
    if let Some(dnssec_ok) = edns::anywhere(message) {
        count(out, 10, 1);
        opt(dnssec_ok, code, None, None, out);
    }
}

/// The parts of a forwarded query's header that the proxy needs to answer it itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryHeader {
    pub id: u16,
    /// Flags, opcode and response code, as in [`Header::flags`].
    pub flags: u16,
    /// `None` if the query had no OPT record; else its flag DO.
    pub edns: Option<bool>,
}

/// Answers a pending query, of which the proxy has only this header and the question.
pub fn to_pending(header: QueryHeader, question: &[u8], code: Rcode, out: &mut Vec<u8>) {
    to_pending_because(header, question, code, None, out);
}

/// Answers a query whose server is out of reach.
pub fn unreachable(header: QueryHeader, question: &[u8], out: &mut Vec<u8>) {
    to_pending_because(header, question, Rcode::ServFail, Some(EDE_NETWORK), out);
}

fn to_pending_because(
    query: QueryHeader,
    question: &[u8],
    code: Rcode,
    extended_error: Option<u16>,
    out: &mut Vec<u8>,
) {
    out.clear();
    let QueryHeader { id, flags, edns } = query;
    let received = Header {
        id,
        flags,
        questions: 1,
        answers: 0,
        authorities: 0,
        additionals: 0,
    };
    header(received, code, out);
    count(out, 4, 1);
    out.extend_from_slice(question);
    if let Some(dnssec_ok) = edns {
        count(out, 10, 1);
        opt(dnssec_ok, code, extended_error, None, out);
    }
}

fn header(received: Header, code: Rcode, out: &mut Vec<u8>) {
    let kept = MASK_OPCODE | FLAG_RECURSION_DESIRED | FLAG_CHECKING_DISABLED;
    let flags = FLAG_RESPONSE | (received.flags & kept) | (code.number() & MASK_RCODE);
    out.extend_from_slice(&received.id.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&[0; 8]);
}

fn count(out: &mut [u8], at: usize, value: u16) {
    super::put_u16(out, at, value);
}

/// An SOA record of the name's parent, so that resolvers may cache the NXDOMAIN.
fn soa(query: &Query<'_>, out: &mut Vec<u8>) {
    match query.question().first() {
        Some(length @ 1..=63) => {
            let parent = 0xc000 | (12 + 1 + u16::from(*length));
            out.extend_from_slice(&parent.to_be_bytes());
        }
        _ => out.push(0),
    }
    out.extend_from_slice(&TYPE_SOA.to_be_bytes());
    out.extend_from_slice(&super::CLASS_IN.to_be_bytes());
    out.extend_from_slice(&NEGATIVE_TTL.to_be_bytes());
    out.extend_from_slice(&22_u16.to_be_bytes());
    out.extend_from_slice(&[0, 0]); // primary server and mailbox: the root
    for number in [1, 3600, 600, 86_400, NEGATIVE_TTL] {
        out.extend_from_slice(&number.to_be_bytes());
    }
}

fn opt(
    dnssec_ok: bool,
    code: Rcode,
    extended_error: Option<u16>,
    cookie: Option<&[u8]>,
    out: &mut Vec<u8>,
) {
    out.push(0);
    out.extend_from_slice(&TYPE_OPT.to_be_bytes());
    out.extend_from_slice(&UDP_SIZE.to_be_bytes());
    let [_, extended_code] = (code.number() >> 4).to_be_bytes();
    let flags = if dnssec_ok { 0x80 } else { 0 };
    out.extend_from_slice(&[extended_code, 0, flags, 0]);
    let length_at = out.len();
    out.extend_from_slice(&[0, 0]);
    if let Some(code) = extended_error {
        option(OPTION_EDE, &code.to_be_bytes(), out);
    }
    if let Some(cookie) = cookie {
        option(edns::OPTION_COOKIE, cookie, out);
    }
    let length = u16::try_from(out.len() - length_at - 2).unwrap_or(0);
    super::put_u16(out, length_at, length);
}

fn option(code: u16, data: &[u8], out: &mut Vec<u8>) {
    // The data is never longer than a cookie.
    let length = u16::try_from(data.len()).unwrap_or(0);
    out.extend_from_slice(&code.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(data);
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{Message, ResponseCode};

    use super::{EDE_BLOCKED, EDE_PROHIBITED, to_query, to_unfit};
    use crate::{
        Rcode, put_u16,
        query::{
            Query,
            tests::{plain, with_edns},
        },
    };

    #[test]
    fn refusal_with_edns() {
        let bytes = with_edns(plain(9, "wWw.x", 1), &[]);
        let mut out = Vec::new();
        to_query(
            &Query::decode(&bytes).unwrap(),
            Rcode::Refused,
            Some(EDE_PROHIBITED),
            &mut out,
        );
        assert!(out[12..].starts_with(&plain(9, "wWw.x", 1)[12..]));
        assert!(out.ends_with(&[0, 15, 0, 2, 0, 18]));
        let message = Message::from_vec(&out).unwrap();
        assert_eq!(message.metadata.response_code, ResponseCode::Refused);
        assert_eq!(message.metadata.id, 9);
        assert!(message.edns.is_some_and(|e| e.flags().dnssec_ok));
    }

    #[test]
    fn name_error_has_an_soa() {
        for name in ["www.example.com", "com", ""] {
            let bytes = plain(9, name, 1);
            let mut out = Vec::new();
            to_query(
                &Query::decode(&bytes).unwrap(),
                Rcode::NxDomain,
                None,
                &mut out,
            );
            let message = Message::from_vec(&out).unwrap();
            assert_eq!(message.metadata.response_code, ResponseCode::NXDomain);
            assert_eq!(message.authorities.len(), 1);
            assert!(message.edns.is_none());
        }
    }

    #[test]
    fn the_longest_fits_into_a_datagram_without_edns() {
        let name = [&"a".repeat(63)[..]; 3].join(".") + "." + &"b".repeat(61);
        let cookie = [&[0, 10, 0, 40][..], &[7; 40]].concat();
        let bytes = with_edns(plain(1, &name, 1), &cookie);
        let query = Query::decode(&bytes).unwrap();
        let mut out = Vec::new();
        to_query(&query, Rcode::NxDomain, Some(EDE_BLOCKED), &mut out);
        assert!(out.len() <= 512, "{}", out.len());
        assert!(out.ends_with(&cookie));
    }

    #[test]
    fn unfit_messages_keep_their_readable_fields() {
        let mut bytes = plain(3, "a.b", 1);
        let mut out = Vec::new();
        put_u16(&mut bytes, 2, 0x2100);
        to_unfit(&bytes, Rcode::NotImp, &mut out);
        assert_eq!(&out[..6], &[0, 3, 0xa1, 4, 0, 1]);
        assert_eq!(out[12..], bytes[12..]);
        to_unfit(&bytes[..13], Rcode::FormErr, &mut out);
        assert_eq!(out.len(), 12);
        to_unfit(&bytes[..3], Rcode::FormErr, &mut out);
        assert!(out.is_empty());
    }
}
