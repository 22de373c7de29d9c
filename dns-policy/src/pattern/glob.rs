//! Patterns with wildcards anywhere, matched by hand: linear in the name for each label tried.

use std::fmt;

use super::name_run;

/// A pattern that is neither exact nor a plain suffix.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Glob {
    /// Whether one or more whole labels come before the literals.
    labels: bool,
    /// At least one literal, with zero or more name bytes between each two.
    literals: Box<[Box<str>]>,
}

impl Glob {
    /// Compiles normalised pattern text: lower case, with the final dot.
    pub(super) fn new(text: &str) -> Self {
        let stars = text.bytes().take_while(|b| *b == b'*').count();
        let tail = text.get(stars..).and_then(|rest| rest.strip_prefix('.'));
        let (labels, rest) = match tail {
            Some(tail) if stars >= 2 => (true, tail),
            _ => (false, text),
        };
        let mut literals: Vec<Box<str>> = Vec::new();
        let mut in_stars = false;
        for piece in rest.split('*') {
            // A run of stars counts as one: the empty pieces between them say nothing.
            if in_stars && piece.is_empty() {
                continue;
            }
            literals.push(piece.into());
            in_stars = true;
        }
        if rest.ends_with('*') {
            literals.push("".into());
        }
        Self {
            labels,
            literals: literals.into(),
        }
    }

    /// Whether all of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        if !self.labels {
            return anchored(&self.literals, name);
        }
        let mut rest = name;
        while let Some(after) = super::one_label(rest) {
            if after.len() + 1 == rest.len() {
                return false; // an empty label
            }
            if anchored(&self.literals, after) {
                return true;
            }
            rest = after;
        }
        false
    }
}

/// Whether `text` is the literals with name bytes between them.
///
/// Taking each literal where it first fits is enough. A gap holds no dot, so a literal with a dot
/// fits in one place only. After a literal without a dot, the next gap can take up whatever a later
/// place would have skipped.
fn anchored(literals: &[Box<str>], text: &str) -> bool {
    let Some((first, others)) = literals.split_first() else {
        return text.is_empty();
    };
    let Some(mut rest) = text.strip_prefix(&**first) else {
        return false;
    };
    let Some((last, middle)) = others.split_last() else {
        return rest.is_empty();
    };
    for literal in middle {
        let reach = name_run(rest.as_bytes());
        match rest.find(&**literal) {
            Some(at) if at <= reach => rest = rest.get(at + literal.len()..).unwrap_or_default(),
            _ => return false,
        }
    }
    rest.strip_suffix(&**last)
        .is_some_and(|gap| name_run(gap.as_bytes()) == gap.len())
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.labels {
            f.write_str("**.")?;
        }
        for (i, literal) in self.literals.iter().enumerate() {
            if i > 0 {
                f.write_str("*")?;
            }
            f.write_str(literal)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Glob;

    #[test]
    fn stars_do_not_cross_dots() {
        let glob = Glob::new("a*b*c.example.");
        assert!(glob.matches("abc.example."));
        assert!(glob.matches("axxbyybzzc.example."));
        assert!(!glob.matches("ax.bc.example."));
        assert!(!glob.matches("ab.example."));
    }

    #[test]
    fn leading_labels() {
        let glob = Glob::new("**.*.x.");
        assert!(glob.matches("a.b.x."));
        assert!(glob.matches("a.b.c.x."));
        assert!(!glob.matches("b.x."));
        assert!(!glob.matches("..x."));
    }

    #[test]
    fn literals_do_not_overlap() {
        assert!(!Glob::new("*.ab*ba.").matches("x.aba."));
        assert!(Glob::new("*.ab*ba.").matches("x.abba."));
    }
}
