//! Reads the members of a large JSON object one by one, as bytes, and no further than needed.
//!
//! An endpoint's learned names may be tens of megabytes, and a proxy that starts needs none of
//! them. This module finds the end of a value by brackets and quotes. The caller parses the values
//! that it needs, and finds the errors in them.

use std::{
    io::{self, Read},
    ops::Range,
};

/// Number of bytes that are read with one call.
const CHUNK: usize = 64 << 10;

/// A JSON object that is read from its beginning.
pub(super) struct Members<R> {
    reader: R,
    bytes: Vec<u8>,
    at: usize,
    ended: bool,
}

/// Why the rest of an object cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum MembersError {
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("byte {0} is not valid in a JSON object, or the file ends there")]
    Syntax(usize),
}

/// The bytes of a key or value; [`Members::bytes`] returns them.
pub(super) type ByteRange = Range<usize>;

impl<R: Read> Members<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            bytes: Vec::new(),
            at: 0,
            ended: false,
        }
    }

    /// The bytes of a key or value.
    pub(super) fn bytes(&self, place: ByteRange) -> &[u8] {
        self.bytes.get(place).unwrap_or_default()
    }

    /// The next key, with its quotes; `None` at the object's end.
    pub(super) fn key(&mut self) -> Result<Option<ByteRange>, MembersError> {
        let first = self.at == 0;
        match (self.token()?, first) {
            (b'{', true) | (b',', false) => {}
            (b'}', false) => return self.end().map(|()| None),
            _ => return Err(MembersError::Syntax(self.at)),
        }
        self.at += 1;
        match self.token()? {
            b'"' => {}
            b'}' if first => {
                return self.end().map(|()| None);
            }
            _ => return Err(MembersError::Syntax(self.at)),
        }
        let start = self.at;
        self.string()?;
        Ok(Some(start..self.at))
    }

    /// The value of the key that was read last.
    pub(super) fn value(&mut self) -> Result<ByteRange, MembersError> {
        if self.token()? != b':' {
            return Err(MembersError::Syntax(self.at));
        }
        self.at += 1;
        self.token()?;
        let start = self.at;
        let mut depth = 0_usize;
        loop {
            match self.byte()? {
                b'"' => {
                    self.string()?;
                    if depth == 0 {
                        break;
                    }
                }
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                // The end of a number or word, or of the object around it.
                b'}' | b']' | b',' if depth == 0 => break,
                b'}' | b']' => {
                    depth -= 1;
                    self.at += 1;
                    if depth == 0 {
                        break;
                    }
                }
                _ => self.at += 1,
            }
        }
        Ok(start..self.at)
    }

    fn end(&mut self) -> Result<(), MembersError> {
        self.at += 1;
        match self.token() {
            Err(MembersError::Syntax(_)) if self.ended && self.at == self.bytes.len() => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(MembersError::Syntax(self.at)),
        }
    }

    /// Goes past a string, from its first quote.
    fn string(&mut self) -> Result<(), MembersError> {
        self.at += 1;
        loop {
            match self.byte()? {
                b'"' => {
                    self.at += 1;
                    return Ok(());
                }
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
    }

    /// The next byte that is not white space.
    fn token(&mut self) -> Result<u8, MembersError> {
        loop {
            match self.byte()? {
                b' ' | b'\t' | b'\r' | b'\n' => self.at += 1,
                byte => return Ok(byte),
            }
        }
    }

    fn byte(&mut self) -> Result<u8, MembersError> {
        loop {
            if let Some(byte) = self.bytes.get(self.at) {
                return Ok(*byte);
            }
            if self.ended {
                return Err(MembersError::Syntax(self.at));
            }
            let before = self.bytes.len();
            let mut more = self.reader.by_ref().take(CHUNK as u64);
            more.read_to_end(&mut self.bytes)?;
            self.ended = self.bytes.len() == before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, String)>, MembersError> {
        let mut members = Members::new(text.as_bytes());
        let mut found = Vec::new();
        while let Some(key) = members.key()? {
            let value = members.value()?;
            let text = |place| String::from_utf8_lossy(members.bytes(place)).into_owned();
            found.push((text(key), text(value)));
        }
        Ok(found)
    }

    #[test]
    fn members_are_distinguished() {
        let text = r#" {"a": 1 ,"b\"}" :[{"x":"]\\\""},[]],"c":"d,}", "e":{} , "f":null}
        "#;
        let expected = [
            (r#""a""#, "1 "),
            (r#""b\"}""#, r#"[{"x":"]\\\""},[]]"#),
            (r#""c""#, r#""d,}""#),
            (r#""e""#, "{}"),
            (r#""f""#, "null"),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(read(text).unwrap(), expected);
        assert!(read("{}").unwrap().is_empty());
    }

    #[test]
    fn text_that_is_not_an_object_is_refused() {
        for text in [
            "",
            "[]",
            "{",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":1",
            "{\"a\":\"",
            "{\"a\":{\"b\":1}",
            "{\"a\":1}}",
            "{\"a\":1} 2",
            "{,}",
            "{\"a\" 1}",
            "{a:1}",
            "{\"a\":1;\"b\":2}",
            "{\"a\":\"\\",
        ] {
            let read = read(text);
            // The value's parser decides whether the value is valid.
            let value = read.as_ref().ok().and_then(|all| all.first());
            assert!(
                value.is_none_or(|(_, value)| value == "1;\"b\":2"),
                "{text}: {read:?}"
            );
            assert!(value.is_some() || read.is_err(), "{text}");
        }
    }
}
