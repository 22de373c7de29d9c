//! Items of a long list of objects, as kubectl prints one, cut out of its text.
//!
//! A list of a whole cluster has a hundred megabytes. Its values would take several times as much,
//! so that each item is read by itself. The text is cut by its outline alone: in block style at the
//! dashes of `items`, in JSON at the commas between its elements. What the cut gives is read as any
//! other document is, so that a text whose outline deceives is refused, and never read otherwise.

use std::ops::Range;

use super::{is_blank, lines};

/// Ranges of a list's items in its text, and the rest of the text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outline {
    pub(super) items: Vec<Item>,
    /// The text without its items.
    pub(super) rest: String,
}

/// Place of one item of a list in its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) at: Range<usize>,
    /// Line of the text on which it begins, counted from 0.
    pub(super) line: usize,
}

/// The items of a text with a field `items` at its top; `None` if it has no such outline.
pub(super) fn outline(text: &str) -> Option<Outline> {
    let body = text.trim_start_matches(|c: char| is_blank(c) || c == '\u{feff}');
    if body.starts_with('{') {
        return in_json(text, text.len() - body.len());
    }
    in_block(text)
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

fn is_empty(line: &str) -> bool {
    let content = line.trim_matches(is_blank);
    content.is_empty() || content.starts_with('#')
}

/// Whether a line without its indentation begins an item.
fn begins_item(content: &str) -> bool {
    let rest = content.strip_prefix('-');
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(is_blank))
}

/// Finds the items of a text in block style.
fn in_block(text: &str) -> Option<Outline> {
    let mut items: Vec<Item> = Vec::new();
    let mut indent = None;
    let (mut before, mut after) = (None, None);
    let mut at = 0;
    for (number, line) in lines(text).enumerate() {
        let start = at;
        at += line.len();
        if before.is_none() {
            let rest = line.strip_prefix("items:");
            if rest.is_some_and(is_empty) {
                before = Some(at);
            }
            continue;
        }
        if is_empty(line) {
            continue;
        }
        let depth = indentation(line);
        let is_item = begins_item(line.get(depth..).unwrap_or_default());
        match indent {
            None if is_item => indent = Some(depth),
            None => return None,
            Some(of_items) if depth > of_items => continue,
            Some(of_items) if depth == of_items && is_item => {}
            Some(_) => {
                after = Some(start);
                break;
            }
        }
        if let Some(last) = items.last_mut() {
            last.at.end = start;
        }
        let at = start..text.len();
        items.push(Item { at, line: number });
    }
    let end = after.unwrap_or(text.len());
    items.last_mut()?.at.end = end;
    let rest = format!(
        "{} []\n{}",
        text.get(..before?)?.trim_end(),
        text.get(end..)?
    );
    Some(Outline { items, rest })
}

/// Finds the items of a JSON text that begins at `from`.
fn in_json(text: &str, from: usize) -> Option<Outline> {
    let mut scan = Scan { text, at: from };
    scan.expect(b'{')?;
    loop {
        let key = scan.string()?;
        scan.expect(b':')?;
        if key == "items" {
            break;
        }
        scan.value()?;
        scan.expect(b',')?;
    }
    scan.space();
    let begin = scan.at;
    scan.expect(b'[')?;
    let mut items = Vec::new();
    let (mut counted, mut line) = (0, 0);
    if scan.peek()? != b']' {
        loop {
            scan.space();
            let start = scan.at;
            scan.value()?;
            line += text.get(counted..start)?.matches('\n').count();
            counted = start;
            let at = start..scan.at;
            items.push(Item { at, line });
            if scan.peek()? != b',' {
                break;
            }
            scan.expect(b',')?;
        }
    }
    scan.expect(b']')?;
    let rest = format!("{}[]{}", text.get(..begin)?, text.get(scan.at..)?);
    Some(Outline { items, rest })
}

/// Walks over JSON by brackets and quotes.
struct Scan<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scan<'a> {
    fn space(&mut self) {
        while self.byte().is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn peek(&mut self) -> Option<u8> {
        self.space();
        self.byte()
    }

    fn expect(&mut self, wanted: u8) -> Option<()> {
        (self.peek()? == wanted).then(|| self.at += 1)
    }

    /// A string as it is written, without its quotes.
    fn string(&mut self) -> Option<&'a str> {
        self.expect(b'"')?;
        let start = self.at;
        loop {
            match self.byte()? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        let found = self.text.get(start..self.at);
        self.at += 1;
        found
    }

    /// One value of any kind.
    fn value(&mut self) -> Option<()> {
        self.space();
        let mut depth = 0_usize;
        let start = self.at;
        loop {
            match self.byte()? {
                b'"' => {
                    self.string()?;
                    if depth == 0 {
                        return Some(());
                    }
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' if depth > 1 => depth -= 1,
                b'}' | b']' if depth == 1 => {
                    self.at += 1;
                    return Some(());
                }
                // The end of a number or word, which belongs to what is around it.
                b'}' | b']' | b',' if depth == 0 => return (self.at > start).then_some(()),
                _ => {}
            }
            self.at += 1;
        }
    }
}

/// The head of an object that is too long to be read: the lines of its apiVersion, its kind, and
/// its name and namespace, in block style.
pub(super) fn head_in_block(text: &str) -> String {
    let mut found = String::new();
    let mut margin = None;
    let mut inner = None;
    for line in lines(text).filter(|line| !is_empty(line)) {
        let depth = indentation(line);
        let margin = *margin.get_or_insert(depth);
        let content = line.get(depth..).unwrap_or_default();
        let is = |name: &str| {
            let rest = content.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(':'))
        };
        if depth == margin {
            inner = is("metadata").then_some(None);
            if ["apiVersion", "kind", "metadata"].into_iter().any(is) {
                found.push_str(line);
            }
        } else if let Some(inner) = &mut inner
            && depth == *inner.get_or_insert(depth)
            && ["name", "namespace"].into_iter().any(is)
        {
            found.push_str(line);
        }
    }
    found
}
