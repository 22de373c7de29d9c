//! Names of interfaces in errors.

use std::fmt;

/// Names of interfaces for an error, limited because a pod can have thousands.
#[derive(Default)]
pub(super) struct Present {
    names: Vec<String>,
    more: usize,
}

impl Present {
    /// Maximum names in an error.
    pub(super) const NAMED: usize = 16;

    pub(super) fn add(&mut self, name: String) {
        if self.names.len() < Self::NAMED {
            self.names.push(name);
        } else {
            self.more += 1;
        }
    }
}

impl fmt::Display for Present {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names.join(", "))?;
        match self.more {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_first_interfaces_of_thousands() {
        let shown = |count: usize| {
            let mut present = Present::default();
            (0..count).for_each(|i| present.add(format!("eth{i}")));
            present.to_string()
        };
        assert_eq!(shown(2), "eth0, eth1");
        assert!(shown(16).ends_with(", eth15"));
        assert!(shown(5000).ends_with(", eth15 and 4984 more"));
    }
}
