//! Makes a new file from the former one and the changes since.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    path::Path,
};

use agent_core::{
    checksum::Sum,
    policy::source::cluster::{Changed, Json},
};
use daemon::regular_file;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Origin, VERSION};

/// The fields of the last line, `},"count":…,"sum":…}`.
#[derive(Deserialize)]
pub(super) struct Tail {
    pub(super) count: usize,
    pub(super) sum: String,
}

/// The first line, which the objects follow.
fn head(origin: &Origin) -> String {
    let (server, cluster) = (json!(origin.server), json!(origin.cluster));
    let authorities = json!(origin.authorities);
    format!(
        r#"{{"version":{VERSION},"server":{server},"cluster":{cluster},"authorities":{authorities},"objects":{{"#
    )
}

/// Key and JSON of a line `"key":{...}`.
pub(super) fn entry(line: &str) -> Option<(String, &str)> {
    let mut keys = serde_json::Deserializer::from_str(line).into_iter::<String>();
    let key = keys.next()?.ok()?;
    let object = line.get(keys.byte_offset()..)?.strip_prefix(':')?;
    Some((key, object))
}

/// Writes `base` with the changes to a new file. `InvalidData`: the base is damaged or gone, so the
/// new file would have gaps.
pub(super) fn merge(
    base: Option<&Path>,
    changes: &Changed,
    origin: &Origin,
    to: &Path,
) -> io::Result<File> {
    let mut out = Out {
        file: BufWriter::new(regular_file::create(to)?),
        sum: Sum::default(),
        count: 0,
    };
    out.file.write_all(head(origin).as_bytes())?;
    let mut changes = changes.iter().peekable();
    if let Some(base) = base {
        let damaged = |reason: &str| {
            let reason = format!("{} is damaged ({reason})", base.display());
            io::Error::new(io::ErrorKind::InvalidData, reason)
        };
        let file = regular_file::open(base).map_err(|error| damaged(&error.to_string()))?;
        let (mut sum, mut count, mut tail) = (Sum::default(), 0_usize, None);
        for line in BufReader::new(file).lines().skip(1) {
            let line = line.map_err(|error| damaged(&error.to_string()))?;
            if let Some(text) = line.strip_prefix("},") {
                tail = serde_json::from_str::<Tail>(&format!("{{{text}")).ok();
                break;
            }
            let line = line.strip_suffix(',').unwrap_or(&line);
            sum.add(line.as_bytes());
            count += 1;
            let (key, _) = entry(line).ok_or_else(|| damaged("a line is no object"))?;
            while let Some((key, json)) = changes.next_if(|(changed, _)| **changed < key) {
                out.put(key, json.as_ref().map(Json::as_str))?;
            }
            match changes.next_if(|(changed, _)| **changed == key) {
                Some((key, json)) => out.put(key, json.as_ref().map(Json::as_str))?,
                None => out.line(line)?,
            }
        }
        let tail = tail.ok_or_else(|| damaged("the end is missing"))?;
        if tail.count != count || tail.sum != sum.hex() {
            return Err(damaged("its sum differs"));
        }
    }
    for (key, json) in changes {
        out.put(key, json.as_ref().map(Json::as_str))?;
    }
    out.end()
}

struct Out {
    file: BufWriter<File>,
    sum: Sum,
    count: usize,
}

impl Out {
    fn put(&mut self, key: &str, json: Option<&str>) -> io::Result<()> {
        match json {
            Some(json) => self.line(&format!("{}:{json}", Value::from(key))),
            None => Ok(()),
        }
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        let separator: &[u8] = if self.count == 0 { b"\n" } else { b",\n" };
        self.file.write_all(separator)?;
        self.file.write_all(line.as_bytes())?;
        self.sum.add(line.as_bytes());
        self.count += 1;
        Ok(())
    }

    fn end(mut self) -> io::Result<File> {
        let (count, sum) = (self.count, self.sum.hex());
        write!(self.file, "\n}},\"count\":{count},\"sum\":\"{sum}\"}}\n")?;
        Ok(self.file.into_inner()?)
    }
}
