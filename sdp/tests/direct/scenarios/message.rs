//! Messages from words: names, types and records in presentation form, byte by byte.

/// Types that have a name here. Any other type is `TYPE<number>` (RFC 3597, 5).
const TYPES: [(&str, u16); 27] = [
    ("A", 1),
    ("NS", 2),
    ("CNAME", 5),
    ("SOA", 6),
    ("NULL", 10),
    ("PTR", 12),
    ("MX", 15),
    ("TXT", 16),
    ("AAAA", 28),
    ("SRV", 33),
    ("NAPTR", 35),
    ("DNAME", 39),
    ("DS", 43),
    ("RRSIG", 46),
    ("NSEC", 47),
    ("DNSKEY", 48),
    ("NSEC3", 50),
    ("TLSA", 52),
    ("SVCB", 64),
    ("HTTPS", 65),
    ("TKEY", 249),
    ("TSIG", 250),
    ("IXFR", 251),
    ("AXFR", 252),
    ("ANY", 255),
    ("URI", 256),
    ("CAA", 257),
];

const CODES: [(&str, u16); 9] = [
    ("NOERROR", 0),
    ("FORMERR", 1),
    ("SERVFAIL", 2),
    ("NXDOMAIN", 3),
    ("NOTIMP", 4),
    ("REFUSED", 5),
    ("NOTAUTH", 9),
    ("BADVERS", 16),
    ("BADCOOKIE", 23),
];

/// Number of the record type OPT (RFC 6891).
const OPT: u16 = 41;
/// Option TCP keepalive, which a proxy does not pass on.
const KEEPALIVE: u16 = 11;

/// Number of a record type that is given by its name, or as `TYPE` and digits.
pub(crate) fn rtype(word: &str) -> Option<u16> {
    match word.strip_prefix("TYPE") {
        Some(number) => number.parse().ok(),
        None => TYPES.iter().find(|(name, _)| *name == word).map(|t| t.1),
    }
}

/// Number of a response code, including extended codes.
pub(crate) fn code(word: &str) -> Option<u16> {
    CODES.iter().find(|(name, _)| *name == word).map(|c| c.1)
}

/// Bytes from hexadecimal digits. `-` is no byte, `00*20` is one byte twenty times.
pub(crate) fn hex(word: &str) -> Result<Vec<u8>, String> {
    if word == "-" {
        return Ok(Vec::new());
    }
    let (digits, times) = match word.split_once('*') {
        Some((digits, times)) => (digits, times.parse().map_err(|_| bad("hex", word))?),
        None => (word, 1),
    };
    if digits.len() % 2 != 0 || !digits.is_ascii() {
        return Err(bad("hex", word));
    }
    let bytes: Result<Vec<u8>, _> = (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16))
        .collect();
    Ok(bytes.map_err(|_| bad("hex", word))?.repeat(times))
}

fn bad(what: &str, word: &str) -> String {
    format!("`{word}` is no {what}")
}

/// A name on the wire. `\DDD` is a byte, `\.` a dot within a label, `{a*63}` 63 letters `a`. Its
/// length is not checked, so that cases can have names that are too long.
pub(crate) fn name(text: &str) -> Result<Vec<u8>, String> {
    let text = &expanded(text).ok_or_else(|| bad("name", text))?;
    let mut wire = Vec::new();
    let mut label = Vec::new();
    let mut end = |label: &mut Vec<u8>| -> Result<(), String> {
        let length = u8::try_from(label.len()).map_err(|_| bad("name", text))?;
        wire.push(length);
        wire.append(label);
        Ok(())
    };
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'.' => {
                if !label.is_empty() {
                    end(&mut label)?;
                }
            }
            b'\\' => match rest {
                [a, b, c, after @ ..] if [a, b, c].iter().all(|d| d.is_ascii_digit()) => {
                    let number = [a, b, c]
                        .iter()
                        .fold(0, |sum: u16, d| sum * 10 + u16::from(**d - b'0'));
                    label.push(u8::try_from(number).map_err(|_| bad("name", text))?);
                    rest = after;
                }
                [byte, after @ ..] => {
                    label.push(*byte);
                    rest = after;
                }
                [] => return Err(bad("name", text)),
            },
            byte => label.push(*byte),
        }
    }
    if !label.is_empty() {
        end(&mut label)?;
    }
    wire.push(0);
    Ok(wire)
}

/// Text with each `{…*times}` expanded.
fn expanded(text: &str) -> Option<String> {
    let Some((before, rest)) = text.split_once('{') else {
        return Some(text.to_owned());
    };
    let (inner, after) = rest.split_once('}')?;
    let (what, times) = inner.split_once('*')?;
    let repeated = what.repeat(times.parse().ok()?);
    Some([before, &repeated, &expanded(after)?].concat())
}

/// A resource record of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// `None`: the name of the question, as a pointer.
    pub(crate) owner: Option<Vec<u8>>,
    pub(crate) ttl: u32,
    pub(crate) rtype: u16,
    pub(crate) data: Vec<u8>,
}

impl Record {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        match &self.owner {
            Some(owner) => out.extend_from_slice(owner),
            None => out.extend_from_slice(&[0xc0, 12]),
        }
        out.extend_from_slice(&self.rtype.to_be_bytes());
        out.extend_from_slice(&1_u16.to_be_bytes());
        out.extend_from_slice(&self.ttl.to_be_bytes());
        let length =
            u16::try_from(self.data.len()).expect("data of a record has 16 bits of length");
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(&self.data);
    }

    /// A record of a private type in the additional section, which makes a message large.
    pub(crate) fn padding(bytes: usize) -> Self {
        Self {
            owner: Some(vec![0]),
            ttl: 0,
            rtype: 65_280,
            data: vec![0xab; bytes],
        }
    }
}

/// Data of a record: addresses, names, the seven words of an SOA, or `\# <length> <hex>`.
pub(crate) fn data(rtype: u16, words: &[&str]) -> Result<Vec<u8>, String> {
    let wrong = || format!("`{}` is no data of type {rtype}", words.join(" "));
    match (rtype, words) {
        (_, ["\\#", length, rest @ ..]) => {
            let bytes = rest
                .iter()
                .map(|word| hex(word))
                .collect::<Result<Vec<_>, _>>()?
                .concat();
            if length.parse() == Ok(bytes.len()) {
                Ok(bytes)
            } else {
                Err(format!("{} bytes of data, not {length}", bytes.len()))
            }
        }
        (1, [address]) => {
            let ip: std::net::Ipv4Addr = address.parse().map_err(|_| wrong())?;
            Ok(ip.octets().to_vec())
        }
        (28, [address]) => {
            let ip: std::net::Ipv6Addr = address.parse().map_err(|_| wrong())?;
            Ok(ip.octets().to_vec())
        }
        (2 | 5 | 12 | 39, [target]) => name(target),
        (6, [primary, mailbox, numbers @ ..]) if numbers.len() == 5 => {
            let mut data = [name(primary)?, name(mailbox)?].concat();
            for number in numbers {
                let number: u32 = number.parse().map_err(|_| wrong())?;
                data.extend_from_slice(&number.to_be_bytes());
            }
            Ok(data)
        }
        _ => Err(wrong()),
    }
}

/// An OPT record (RFC 6891, 6.1).
#[derive(Clone, Debug)]
pub(crate) struct Opt {
    pub(crate) size: u16,
    pub(crate) extended_code: u8,
    pub(crate) version: u8,
    pub(crate) flags: u16,
    pub(crate) options: Vec<(u16, Vec<u8>)>,
}

impl Default for Opt {
    fn default() -> Self {
        Self {
            size: 1232,
            extended_code: 0,
            version: 0,
            flags: 0,
            options: Vec::new(),
        }
    }
}

impl Opt {
    /// Writes the record. `end_to_end`: in the form in which a proxy passes it on.
    pub(crate) fn write(&self, end_to_end: bool, out: &mut Vec<u8>) {
        let mut data = Vec::new();
        for (number, bytes) in &self.options {
            if end_to_end && *number == KEEPALIVE {
                continue;
            }
            data.extend_from_slice(&number.to_be_bytes());
            let length = u16::try_from(bytes.len()).expect("an option has 16 bits of length");
            data.extend_from_slice(&length.to_be_bytes());
            data.extend_from_slice(bytes);
        }
        out.push(0);
        out.extend_from_slice(&OPT.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&[self.extended_code, self.version]);
        out.extend_from_slice(&self.flags.to_be_bytes());
        let length = u16::try_from(data.len()).expect("data of a record has 16 bits of length");
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(&data);
    }
}

/// The question after the header, if it is complete.
pub(crate) fn question(message: &[u8]) -> Option<&[u8]> {
    let mut at = 12;
    loop {
        match *message.get(at)? {
            0 => return message.get(12..at + 5),
            length @ 1..=63 => at += 1 + usize::from(length),
            _ => return None,
        }
    }
}

/// Overwrites two bytes at `at` with `value`, in network order.
pub(crate) fn put(message: &mut [u8], at: usize, value: u16) {
    message[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
