//! Queries as clients send them.

use dns_policy::name::NameBuf;

use super::{HEADER_LEN, Header, Rcode, edns, edns::Edns, labels, u16_at};

/// A query that may be judged.
#[derive(Clone, Debug)]
pub struct Query<'a> {
    /// The whole message, without the length prefix of TCP.
    pub message: &'a [u8],
    pub header: Header,
    /// Name of the question, in lower case and with the final dot.
    pub name: NameBuf,
    pub qtype: u16,
    pub qclass: u16,
    /// OPT record of the query.
    pub edns: Option<Edns>,
    question_end: usize,
}

/// Reaction to a message that is not a query which can be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Nothing: no header, or a response (answering could loop).
    Ignore,
    /// A reply with this response code.
    Answer(Rcode),
}

impl<'a> Query<'a> {
    /// Reads a query.
    ///
    /// A query has exactly one question (RFC 9619), opcode QUERY (else the answer is NOTIMP; RFC 8906,
    /// 3.1.4) and no more records than a query may carry. All of them must be readable.
    pub fn decode(message: &'a [u8]) -> Result<Self, Unfit> {
        let header = Header::read(message).ok_or(Unfit::Ignore)?;
        if header.is_response() {
            return Err(Unfit::Ignore);
        }
        if header.opcode() != 0 {
            return Err(Unfit::Answer(Rcode::NotImp));
        }
        let fits = header.questions == 1
            && header.answers <= 1
            && header.authorities <= 1
            && header.additionals <= 2;
        if !fits {
            return Err(Unfit::Answer(Rcode::FormErr));
        }
        Self::body(message, header).ok_or(Unfit::Answer(Rcode::FormErr))
    }

    fn body(message: &'a [u8], header: Header) -> Option<Self> {
        let name_end = labels::skip_plain(message, HEADER_LEN)?;
        let mut name = NameBuf::default();
        labels::read(message, HEADER_LEN, &mut name)?;
        let question_end = name_end + 4;
        let qtype = u16_at(message, name_end)?;
        let qclass = u16_at(message, name_end + 2)?;
        let records = [header.answers, header.authorities, header.additionals];
        let count = records.into_iter().map(usize::from).sum();
        let (edns, _) = edns::find(message, question_end, count)?;
        Some(Self {
            message,
            header,
            name,
            qtype,
            qclass,
            edns,
            question_end,
        })
    }

    /// The question, as sent: name, type and class.
    #[inline]
    pub fn question(&self) -> &'a [u8] {
        self.message
            .get(HEADER_LEN..self.question_end)
            .unwrap_or_default()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Query, Unfit};
    use crate::{Rcode, put_u16};

    /// A query for `name` (text, no escapes) and type, without EDNS.
    pub(crate) fn plain(id: u16, name: &str, qtype: u16) -> Vec<u8> {
        let mut message = vec![0; 12];
        put_u16(&mut message, 0, id);
        put_u16(&mut message, 2, 0x0100);
        put_u16(&mut message, 4, 1);
        for label in name.split('.').filter(|l| !l.is_empty()) {
            message.push(u8::try_from(label.len()).unwrap());
            message.extend_from_slice(label.as_bytes());
        }
        message.push(0);
        message.extend_from_slice(&qtype.to_be_bytes());
        message.extend_from_slice(&1_u16.to_be_bytes());
        message
    }

    /// Adds an OPT record that carries `options`.
    pub(crate) fn with_edns(mut message: Vec<u8>, options: &[u8]) -> Vec<u8> {
        put_u16(&mut message, 10, 1);
        message.extend_from_slice(&[0, 0, 41, 0x10, 0, 0, 0, 0x80, 0]);
        message.extend_from_slice(&u16::try_from(options.len()).unwrap().to_be_bytes());
        message.extend_from_slice(options);
        message
    }

    #[test]
    fn reads_a_query() {
        let bytes = with_edns(plain(7, "WWW.Example.com", 28), &[]);
        let query = Query::decode(&bytes).unwrap();
        assert_eq!(query.name.as_str(), "www.example.com.");
        assert_eq!((query.header.id, query.qtype, query.qclass), (7, 28, 1));
        assert_eq!(query.question(), &bytes[12..33]);
        let edns = query.edns.unwrap();
        assert_eq!(
            (edns.udp_size, edns.dnssec_ok, edns.version),
            (4096, true, 0)
        );
    }

    #[test]
    fn unfit() {
        let good = plain(1, "a.b", 1);
        let with = |at: usize, value: u16| {
            let mut bytes = good.clone();
            put_u16(&mut bytes, at, value);
            Query::decode(&bytes).map(|_| ()).unwrap_err()
        };
        assert_eq!(
            Query::decode(&good[..11]).map(|_| ()).unwrap_err(),
            Unfit::Ignore
        );
        assert_eq!(with(2, 0x8100), Unfit::Ignore);
        assert_eq!(with(2, 0x2000), Unfit::Answer(Rcode::NotImp));
        assert_eq!(with(4, 0), Unfit::Answer(Rcode::FormErr));
        assert_eq!(with(4, 2), Unfit::Answer(Rcode::FormErr));
        assert_eq!(with(6, 2), Unfit::Answer(Rcode::FormErr));
        assert_eq!(with(10, 1), Unfit::Answer(Rcode::FormErr));
        for cut in 12..good.len() {
            let error = Query::decode(&good[..cut]).map(|_| ()).unwrap_err();
            assert_eq!(error, Unfit::Answer(Rcode::FormErr), "{cut}");
        }
        let mut pointer = good.clone();
        pointer[12] = 0xc0;
        assert!(Query::decode(&pointer).is_err());
    }

    #[test]
    fn keepalive_is_removed() {
        let cookie = [0, 10, 0, 2, 1, 2];
        let keepalive = [0, 11, 0, 0];
        let mut bytes = with_edns(plain(1, "a.b", 1), &[&cookie[..], &keepalive].concat());
        let edns = Query::decode(&bytes).unwrap().edns.unwrap();
        assert!(edns.has_keepalive());
        edns.strip_keepalive(&mut bytes);
        assert_eq!(bytes, with_edns(plain(1, "a.b", 1), &cookie));
    }
}
