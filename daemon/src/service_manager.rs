//! Reports to the service manager that started this process: systemd's notification protocol
//! (sd_notify(3)). Without `NOTIFY_SOCKET` in the environment nothing is sent.

use std::{
    ffi::OsString,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::Arc,
};

use parking_lot::Mutex;

/// The service manager, if there is one. Cheap to clone; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct ServiceManager {
    socket: Option<Arc<UnixDatagram>>,
    /// The state that was sent last.
    last: Arc<Mutex<String>>,
}

impl ServiceManager {
    /// Connects to the socket in the environment. Call it before privileges are dropped.
    ///
    /// # Errors
    /// The environment names a socket that cannot be used.
    #[expect(
        clippy::disallowed_methods,
        reason = "the variable is a protocol, no setting"
    )]
    pub fn of_environment() -> io::Result<Self> {
        match std::env::var_os("NOTIFY_SOCKET") {
            Some(address) if !address.is_empty() => Self::connect(&address),
            _ => Ok(Self::default()),
        }
    }

    /// `address`: a path, or `@` and an abstract name.
    fn connect(address: &OsString) -> io::Result<Self> {
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        // A manager that does not read must not stop this process.
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: Some(Arc::new(socket)),
            ..Self::default()
        })
    }

    /// Whether a manager reads the reports.
    pub fn is_present(&self) -> bool {
        self.socket.is_some()
    }

    /// Sends the state if it differs from the last one. `status` is a line for people.
    pub fn state(&self, is_ready: bool, status: &str) {
        let status = status.replace('\n', " ");
        let ready = if is_ready { "READY=1\n" } else { "" };
        let state = format!("{ready}STATUS={status}\n");
        let mut last = self.last.lock();
        if *last != state && self.send(&state) {
            *last = state;
        }
    }

    /// Reports that the process works, which resets the manager's watchdog timer.
    pub fn alive(&self) {
        self.send("WATCHDOG=1\n");
    }

    /// Reports that the process begins to stop.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=stopping\n");
    }

    /// Sends a message. Returns whether the manager received it. A lost message is not repeated,
    /// because a later one replaces it.
    fn send(&self, message: &str) -> bool {
        let sent = self
            .socket
            .as_ref()
            .map(|socket| socket.send(message.as_bytes()));
        matches!(sent, Some(Ok(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 512];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    #[test]
    fn states_are_sent_once_to_a_path_or_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("holdfast-test-{}", std::process::id());
        let at_name = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let sockets = [
            (path.clone().into(), UnixDatagram::bind(&path).unwrap()),
            (
                format!("@{name}").into(),
                UnixDatagram::bind_addr(&at_name).unwrap(),
            ),
        ];
        for (address, socket) in sockets {
            let manager = ServiceManager::connect(&address).unwrap();
            manager.state(false, "waits for\nrules");
            manager.state(true, "serves");
            manager.state(true, "serves");
            manager.alive();
            manager.stopping();
            assert_eq!(received(&socket), "STATUS=waits for rules\n");
            assert_eq!(received(&socket), "READY=1\nSTATUS=serves\n");
            assert_eq!(received(&socket), "WATCHDOG=1\n");
            assert!(received(&socket).starts_with("STOPPING=1\n"));
        }
    }

    #[test]
    fn without_a_manager_nothing_is_sent_and_a_wrong_address_is_an_error() {
        let none = ServiceManager::default();
        none.state(true, "serves");
        assert!(!none.is_present());
        assert!(ServiceManager::connect(&"/nowhere/notify".into()).is_err());
    }

    #[test]
    fn a_manager_that_reads_nothing_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let manager = ServiceManager::connect(&path.into()).unwrap();
        for _ in 0..100_000 {
            manager.alive();
        }
        manager.state(true, "serves");
        assert_eq!(received(&socket), "WATCHDOG=1\n");
    }
}
