//! The terminal of a command: its width and colours, and text without control characters for it.

use std::{
    io::{self, IsTerminal as _, Write as _},
    sync::OnceLock,
};

/// The screen of this process. Unset: there is no terminal.
static SCREEN: OnceLock<Screen> = OnceLock::new();
/// Minimum width of a table. A narrower table cannot be read.
const NARROWEST: usize = 40;
/// First words of lines: `BAD` for what is wrong, and `ODD` for what deserves a look.
const BAD: [&str; 5] = ["PROBLEM", "DROPPED", "REFUSED", "refused:", "deny"];
const ODD: [&str; 2] = ["WARNING", "warning:"];

/// How standard output shows a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Screen {
    /// Columns of a line; `None` without a terminal, so that a line may have any length.
    pub width: Option<usize>,
    /// Whether words may be coloured.
    pub colours: bool,
}

impl Screen {
    /// The screen that `main` found with [`Screen::detect`]. Without that call, the screen is no
    /// terminal.
    pub fn current() -> Self {
        SCREEN.get().copied().unwrap_or_default()
    }

    /// Finds out what standard output is. `NO_COLOR` and `TERM=dumb` turn colours off, as they do in
    /// help texts.
    #[expect(
        clippy::disallowed_methods,
        reason = "what a terminal can do is no setting"
    )]
    pub fn detect() {
        let is_terminal = io::stdout().is_terminal();
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok();
        let width = size.map(|size| usize::from(size.ws_col));
        let width = width.filter(|width| is_terminal && *width > 0);
        let screen = Self {
            width: width.map(|width| width.max(NARROWEST)),
            colours: is_terminal && !is_set("NO_COLOR") && !is_dumb,
        };
        let _set_before = SCREEN.set(screen);
    }

    /// Colours the headings and the first words of alarming lines, in a text that was made
    /// harmless.
    pub fn paint(self, text: &str) -> String {
        if !self.colours {
            return text.to_owned();
        }
        text.split_inclusive('\n').map(painted).collect()
    }
}

fn painted(line: &str) -> String {
    let (body, end) = match line.strip_suffix('\n') {
        Some(body) => (body, "\n"),
        None => (line, ""),
    };
    let styled = |code: &str, text: &str| format!("\x1b[{code}m{text}\x1b[0m");
    if is_heading(body) {
        return styled("1", body) + end;
    }
    let start = body.len() - body.trim_start().len();
    let (indent, rest) = body.split_at(start);
    let word = rest.split(' ').next().unwrap_or_default();
    let code = match word {
        word if BAD.contains(&word) => "1;31",
        word if ODD.contains(&word) => "33",
        _ => return line.to_owned(),
    };
    let rest = rest.get(word.len()..).unwrap_or_default();
    format!("{indent}{}{rest}{end}", styled(code, word))
}

/// Whether a line is the heading of a table: several words of capitals.
fn is_heading(line: &str) -> bool {
    let is_capital = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-';
    let mut words = line.split_whitespace();
    line.contains("  ")
        && line.starts_with(|c: char| c.is_ascii_uppercase())
        && words.all(|word| word.chars().all(is_capital))
}

/// Text that cannot control a terminal. Control characters except line feed and tab become JSON
/// escapes, and so do characters that change the direction of text. Names and reasons come from
/// peers.
pub fn harmless(text: &str) -> String {
    escaped(text, |c| !matches!(c, '\n' | '\t') && is_steering(c))
}

/// Like [`harmless`], in one line.
pub fn one_line(text: &str) -> String {
    escaped(text, is_steering)
}

/// Whether a character controls the terminal instead of filling a place on it.
pub(super) fn is_steering(c: char) -> bool {
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    if !text.contains(&is_escaped) {
        return text.to_owned();
    }
    let characters = text.chars().map(|c| match c {
        '\n' if is_escaped(c) => "\\n".to_owned(),
        '\r' => "\\r".to_owned(),
        '\t' if is_escaped(c) => "\\t".to_owned(),
        c if is_escaped(c) => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    });
    characters.collect()
}

/// Writes to standard output. Returns whether the reader still reads. A reader that closed the pipe
/// is no error.
///
/// # Errors
/// Standard output cannot be written, for example because the disk is full.
pub fn write(text: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_steers_a_terminal() {
        let shown = harmless("a\u{1b}[2Jb\r\u{9b}c\td\u{7f}\ne\u{202e}f");
        assert_eq!(
            shown,
            "a\\u001b[2Jb\\rc\\td\ne\\u202ef"
                .replace("\\rc", "\\r\\u009bc")
                .replace("d\n", "d\\u007f\n")
                .replace("\\td", "\td")
        );
        assert_eq!(one_line("a\n\tb"), "a\\n\\tb");
        assert_eq!(harmless("plain\n\ttext"), "plain\n\ttext");
    }

    #[test]
    fn headings_and_alarms_are_painted_on_a_terminal_only() {
        let text =
            "ID  NAME\n1   a\nPROBLEM  it is away\n  DROPPED  egress\nwarning: x\nAll right\n";
        assert_eq!(Screen::default().paint(text), text);
        let colours = Screen {
            width: Some(80),
            colours: true,
        };
        assert_eq!(
            colours.paint(text),
            "\x1b[1mID  NAME\x1b[0m\n1   a\n\x1b[1;31mPROBLEM\x1b[0m  it is away\n  \
             \x1b[1;31mDROPPED\x1b[0m  egress\n\x1b[33mwarning:\x1b[0m x\nAll right\n"
        );
    }
}
