//! Which agents run in this network namespace: each holds the name of an abstract Unix socket. The
//! kernel has these names for each network namespace, and frees one when its process ends.

use std::{
    fs, io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
};

use dns_policy::boot_time::BootTime;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Name of `netpol run`. Only one process can hold it.
const NETPOL: &str = "holdfast-netpol";
/// Names of `run` begin with this text, followed by the process id and a time. Several agents may run in one
/// namespace, even with equal ids in different containers.
const RUN: &str = "holdfast-run.";
/// Sockets of this network namespace, with `@` before abstract names.
const SOCKETS: &str = "/proc/self/net/unix";

/// Why `netpol run` cannot have this network namespace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetnsError {
    /// Another process holds the name.
    #[error(
        "another `holdfast-agent netpol run` (pid {pid}) enforces policy in this network namespace; stop it first"
    )]
    Busy {
        /// Id of that process; `unknown` if it is not visible from here.
        pid: String,
    },
    /// An agent with programs runs.
    #[error(
        "`holdfast-agent run` (pid {pid}) enforces policy in this network namespace, also NetworkPolicies; \
         stop it, start `holdfast-agent netpol run`, and then take its programs off with `holdfast-agent \
         cleanup`: they stay in force until then"
    )]
    Run {
        /// Process id as that agent sees it.
        pid: String,
    },
    /// The kernel refuses such a socket, or the sockets cannot be listed.
    #[error("cannot see which agents run in this network namespace: {0}; mount /proc")]
    Io(#[from] io::Error),
}

/// Holds a name until dropped.
#[derive(Debug)]
pub(crate) struct NetnsLock {
    _socket: UnixListener,
}

impl NetnsLock {
    /// The lock for `netpol run`, which enforces alone.
    pub(crate) fn of_netpol() -> Result<Self, NetnsError> {
        let lock = bind(NETPOL).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => NetnsError::Busy { pid: holder() },
            _ => NetnsError::Io(error),
        })?;
        match run()? {
            Some(pid) => Err(NetnsError::Run { pid }),
            None => Ok(lock),
        }
    }

    /// The lock for `run`. Several may run in one namespace.
    pub(crate) fn of_run() -> io::Result<Self> {
        let (pid, now) = (std::process::id(), BootTime::now().nanos());
        bind(&format!("{RUN}{pid}.{now}"))
    }
}

/// Process id of a `run` in this network namespace, as that agent sees it; `None` if there is none.
pub(crate) fn run() -> io::Result<Option<String>> {
    let names = names()?;
    let mut of_run = names.iter().filter_map(|name| name.strip_prefix(RUN));
    let pid = of_run.next().and_then(|name| name.split('.').next());
    Ok(pid.map(str::to_owned))
}

/// Whether a `netpol run` runs in this network namespace.
pub(crate) fn has_netpol() -> io::Result<bool> {
    Ok(names()?.iter().any(|name| name == NETPOL))
}

fn bind(name: &str) -> io::Result<NetnsLock> {
    let address = SocketAddr::from_abstract_name(name)?;
    let socket = UnixListener::bind_addr(&address)?;
    Ok(NetnsLock { _socket: socket })
}

/// Process id of the `netpol run` that holds its name; `unknown` if it is not visible from here.
pub(crate) fn holder() -> String {
    let connected = SocketAddr::from_abstract_name(NETPOL)
        .and_then(|address| UnixStream::connect_addr(&address));
    let credentials = connected.map(|stream| getsockopt(&stream, PeerCredentials));
    match credentials {
        Ok(Ok(peer)) if peer.pid() > 0 => peer.pid().to_string(),
        _ => "unknown".to_owned(),
    }
}

/// Abstract names of sockets in this network namespace.
fn names() -> io::Result<Vec<String>> {
    let sockets = fs::read_to_string(SOCKETS)?;
    let names = sockets.lines().filter_map(|line| line.split_once(" @"));
    Ok(names.map(|(_, name)| name.to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_one_is_refused_with_the_process_of_the_first() {
        let lock = NetnsLock::of_netpol().unwrap();
        assert!(has_netpol().unwrap());
        let error = NetnsLock::of_netpol().unwrap_err().to_string();
        let own = format!("(pid {})", std::process::id());
        assert!(error.contains(&own), "{error}");
        drop(lock);
        assert!(!has_netpol().unwrap());
        let run = NetnsLock::of_run().unwrap();
        let error = NetnsLock::of_netpol().unwrap_err().to_string();
        assert!(error.contains("`holdfast-agent run`"), "{error}");
        assert!(error.contains(&own), "{error}");
        drop(run);
        drop(NetnsLock::of_netpol().unwrap());
    }
}
