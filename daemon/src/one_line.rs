//! One line for each event of the log, whatever its fields hold.
//!
//! Peers choose names, reasons and addresses that are logged. A line feed in one of them would
//! begin a line that looks like one of ours, and other control characters would steer a terminal.

use std::io::{self, Write};

use tracing_subscriber::fmt::MakeWriter;

/// Makes writers that escape control characters, except the line feed that ends an event.
///
/// The formatter gives each event to its writer in one call. Its colours must be off, because they
/// are control characters, too. The escapes are JSON's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OneLine<M>(pub(crate) M);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for OneLine<M> {
    type Writer = Escaping<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Escaping(self.0.make_writer())
    }
}

/// Writer of [`OneLine`], which escapes the control characters of each event.
#[derive(Debug)]
pub(crate) struct Escaping<W>(W);

impl<W: Write> Write for Escaping<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let (line, end) = match event.strip_suffix(b"\n") {
            Some(line) => (line, &b"\n"[..]),
            None => (event, &b""[..]),
        };
        let text = String::from_utf8_lossy(line);
        if text.contains(char::is_control) {
            let mut escaped = Vec::with_capacity(event.len() + 16);
            for c in text.chars() {
                match c {
                    '\n' => escaped.extend(b"\\n"),
                    '\r' => escaped.extend(b"\\r"),
                    '\t' => escaped.extend(b"\\t"),
                    c if c.is_control() => write!(escaped, "\\u{:04x}", u32::from(c))?,
                    c => write!(escaped, "{c}")?,
                }
            }
            escaped.extend(end);
            self.0.write_all(&escaped)?;
        } else {
            self.0.write_all(event)?;
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_a_peer_sends_makes_no_line_of_its_own() {
        let lines = Lines::default();
        let written = lines.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(OneLine(move || lines.clone()))
            .with_ansi(false)
            .finish();
        let name = "x\n2026-01-01T00:00:00Z  INFO agent starts\r\u{1b}[2J\u{7}\u{85}";
        tracing::subscriber::with_default(log, || {
            tracing::info!(instance = %name, reason = name, "proxy {name} connected");
        });
        let text = String::from_utf8(written.0.lock().clone()).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text:?}");
        let controls: Vec<char> = text.chars().filter(|c| c.is_control()).collect();
        assert_eq!(controls, ['\n'], "{text:?}");
    }
}
