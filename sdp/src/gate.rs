//! Whether this process can answer queries. A proxy takes steering slots only if it can.
//!
//! A proxy without rules refuses queries that another proxy of the port would allow. A Cilium agent
//! sends snapshots without rules for a while after its start. So a snapshot without rules does not
//! show that there are no rules.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _},
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;

/// If the snapshots of a Cilium agent have no rules for this long, there are no rules.
pub(crate) const NO_RULES_AFTER: Duration = Duration::from_secs(15);

/// Whether queries can be answered. The composition root sets it, and the workers read it. Cheap to
/// clone; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<ArcSwapOption<String>>);

impl Gate {
    /// Opens the gate, or closes it for a reason.
    pub fn set(&self, can_answer: Result<(), String>) {
        match can_answer {
            Ok(()) => self.0.store(None),
            Err(why) => self.0.store(Some(Arc::new(why))),
        }
    }

    /// Why queries cannot be answered; `None` if they can be.
    pub fn closed(&self) -> Option<Arc<String>> {
        self.0.load_full()
    }
}

/// The rules that the agent has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SentRules {
    /// The agent has sent no rules since the process started.
    None,
    /// All rules that there are (native service).
    Whole,
    /// Snapshots (FQDNData), the first one at this time. They may lack rules while the agent starts.
    State(Instant),
}

/// Whether queries can be answered; if not, why.
///
/// `endpoints`: why clients cannot be told apart; `None` if they can be. `with_rules`: how many
/// endpoints have rules.
pub(crate) fn can_answer(
    endpoints: Option<String>,
    with_rules: usize,
    sent_rules: SentRules,
    now: Instant,
) -> Result<(), String> {
    if let Some(problem) = endpoints {
        return Err(problem);
    }
    match sent_rules {
        _ if with_rules > 0 => Ok(()),
        SentRules::Whole => Ok(()),
        SentRules::State(since) if now.saturating_duration_since(since) >= NO_RULES_AFTER => Ok(()),
        SentRules::State(_) => Err("the agent has not sent rules of any endpoint yet".to_owned()),
        SentRules::None => Err("neither the agent nor a file has given rules yet".to_owned()),
    }
}

/// The kernel's lists of UDP sockets. They are opened at the start, because the sandbox of the process
/// later allows no new files.
#[derive(Debug)]
pub(crate) struct BoundPorts(Vec<File>);

impl BoundPorts {
    /// Opens the lists of UDP sockets of this network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let files = ["/proc/net/udp", "/proc/net/udp6"].map(File::open);
        Ok(Self(files.into_iter().collect::<Result<_, _>>()?))
    }

    /// A value without lists: no port counts as bound.
    pub(crate) fn unknown() -> Self {
        Self(Vec::new())
    }

    /// Whether a socket is bound to the port.
    pub(crate) fn has(&mut self, port: u16) -> io::Result<bool> {
        for file in &mut self.0 {
            let mut text = String::new();
            file.rewind()?;
            file.read_to_string(&mut text)?;
            if has_port(&text, port) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Whether `text`, read from `/proc/net/udp`, lists a socket that is bound to the port.
fn has_port(text: &str, port: u16) -> bool {
    let ending = format!(":{port:04X}");
    let local = text
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().nth(1));
    local.into_iter().any(|local| local.ends_with(&ending))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn only_rules_or_a_report_that_there_are_none_open_the_gate() {
        let start = Instant::now();
        let opens = |with_rules, sent_rules, after| {
            can_answer(None, with_rules, sent_rules, start + after).is_ok()
        };
        let (soon, late) = (Duration::from_secs(5), NO_RULES_AFTER);
        assert!(!opens(0, SentRules::None, late));
        assert!(opens(0, SentRules::Whole, soon));
        assert!(!opens(0, SentRules::State(start), soon));
        assert!(opens(0, SentRules::State(start), late));
        assert!(opens(1, SentRules::None, soon) && opens(1, SentRules::State(start), soon));
        let unknown = can_answer(Some("no cilium_lxc".to_owned()), 1, SentRules::Whole, start);
        assert_eq!(unknown, Err("no cilium_lxc".to_owned()));
    }

    #[test]
    fn a_bound_port_is_found_until_its_socket_is_closed() {
        let mut ports = BoundPorts::open().unwrap();
        let socket = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(ports.has(port).unwrap());
        drop(socket);
        assert!(!ports.has(port).unwrap());
        assert!(!BoundPorts::unknown().has(port).unwrap());
    }
}
