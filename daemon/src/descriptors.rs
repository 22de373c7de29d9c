//! The limit on open descriptors (`RLIMIT_NOFILE`), and how many connections fit below it.

use std::{fs, io};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Descriptors that are reserved for each TCP connection of a client: one for it, one for the
/// connection to its server, and two for UDP sockets and everything else.
const PER_CONNECTION: usize = 4;

/// Directory of this process's descriptors. Its size is their number (proc(5), since Linux 6.2).
const OWN: &str = "/proc/self/fd";

/// Number of descriptors that this process may have open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors(usize);

impl Descriptors {
    /// The number that this process may have open now.
    pub fn now() -> Self {
        let limits = getrlimit(Resource::RLIMIT_NOFILE);
        let (soft, _) = limits.unwrap_or((1024, 1024));
        Self(usize::try_from(soft).unwrap_or(usize::MAX))
    }

    /// Number of descriptors that may be open.
    pub fn limit(self) -> usize {
        self.0
    }

    /// The descriptors that are left beside `others`; at least a quarter of all.
    pub fn beside(self, others: usize) -> Self {
        Self(self.0.saturating_sub(others).max(self.0 / 4))
    }

    /// Descriptors that this process has open. Before Linux 6.2 a process whose files are restricted
    /// cannot see them.
    pub fn open() -> io::Result<usize> {
        match fs::metadata(OWN)?.len() {
            // Before Linux 6.2. One descriptor belongs to the listing itself.
            0 => Ok(fs::read_dir(OWN)?.count().saturating_sub(1)),
            open => Ok(usize::try_from(open).unwrap_or(usize::MAX)),
        }
    }

    /// Raises the soft limit to the hard one. The usual soft limit of 1,024 is too low for our own
    /// limits on sockets and connections.
    pub fn raise() -> Self {
        let limits = getrlimit(Resource::RLIMIT_NOFILE);
        let (soft, hard) = limits.unwrap_or((1024, 1024));
        let now = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => hard,
            Err(error) => {
                tracing::warn!(
                    %error,
                    soft,
                    hard,
                    "cannot raise the limit on open descriptors: set LimitNOFILE= in the unit, \
                     or ulimit -n"
                );
                soft
            }
        };
        Self(usize::try_from(now).unwrap_or(usize::MAX))
    }

    /// The number of TCP connections for which there are descriptors, at most `wanted`.
    pub fn tcp_connections(self, wanted: usize) -> usize {
        let fit = (self.0 / PER_CONNECTION).clamp(1, wanted.max(1));
        if fit < wanted {
            tracing::warn!(
                connections = fit,
                descriptors = self.0,
                "fewer TCP connections of clients than usual: allow {} open descriptors \
                 (LimitNOFILE= in the unit, or ulimit -n)",
                wanted * PER_CONNECTION
            );
        }
        fit
    }

    /// The number of peers, at most `wanted`, that can have one descriptor each while `others`
    /// descriptors are used for other purposes.
    pub fn connections(self, wanted: usize, others: usize) -> usize {
        let fit = self.0.saturating_sub(others).clamp(1, wanted.max(1));
        if fit < wanted {
            tracing::warn!(
                connections = fit,
                descriptors = self.0,
                "fewer connections than wanted: allow {} open descriptors (LimitNOFILE= in the unit, \
                 or ulimit -n)",
                wanted + others
            );
        }
        fit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let Descriptors(now) = Descriptors::raise();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(soft, hard);
        assert_eq!(u64::try_from(now).unwrap(), hard);
    }

    #[test]
    fn open_descriptors_are_counted() {
        let before = Descriptors::open().unwrap();
        let held: Vec<_> = (0..500)
            .map(|_| fs::File::open("/dev/null").unwrap())
            .collect();
        // Other tests open and close descriptors at the same time.
        assert!(Descriptors::open().unwrap() > before + 300);
        drop(held);
    }

    #[test]
    fn connections_leave_descriptors_for_everything_else() {
        assert_eq!(Descriptors(1024).tcp_connections(4096), 256);
        assert_eq!(Descriptors(1 << 20).tcp_connections(4096), 4096);
        assert_eq!(Descriptors(2).tcp_connections(4096), 1);
        assert_eq!(Descriptors(1024).connections(1000, 300), 724);
        assert_eq!(Descriptors(1024).connections(100, 300), 100);
        assert_eq!(Descriptors(200).connections(100, 300), 1);
        assert_eq!(Descriptors(1000).beside(300), Descriptors(700));
        assert_eq!(Descriptors(1000).beside(2000), Descriptors(250));
    }
}
