//! Opens connections and keeps them silent until its standard input ends. A connection that the
//! other side closes is opened again.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use daemon::unix_socket::connect_now;
use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        socket::{MsgFlags, recv},
    },
};

/// Pause between two checks for closed connections.
const PAUSE: Duration = Duration::from_millis(20);
/// After this time the number of open connections is printed, even if it is lower than wanted.
const FIRST: Duration = Duration::from_secs(5);

/// Opens idle connections.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A unix socket
    #[arg(long, conflicts_with = "tcp")]
    unix: Option<PathBuf>,
    /// A TCP address
    #[arg(long)]
    tcp: Option<SocketAddr>,
    /// Connections
    #[arg(long, default_value_t = 4000)]
    number: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let begin = Instant::now();
    let mut open: Vec<OwnedFd> = Vec::new();
    let mut said = false;
    loop {
        while open.len() < options.number {
            let Ok(connection) = connect(options) else {
                break;
            };
            let _ = fcntl(&connection, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
            open.push(connection);
        }
        if !said && (open.len() == options.number || begin.elapsed() > FIRST) {
            println!("{} connections", open.len());
            std::io::stdout().flush()?;
            said = true;
        }
        std::thread::sleep(PAUSE);
        open.retain(|connection| {
            let read = recv(connection.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT);
            read == Err(nix::errno::Errno::EAGAIN)
        });
    }
}

fn connect(options: &Options) -> Result<OwnedFd> {
    match (&options.unix, options.tcp) {
        (Some(path), _) => Ok(connect_now(path)?),
        (None, Some(to)) => Ok(TcpStream::connect_timeout(&to, Duration::from_millis(500))?.into()),
        (None, None) => bail!("give --unix or --tcp"),
    }
}
