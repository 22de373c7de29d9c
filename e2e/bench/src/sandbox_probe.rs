//! Enters the proxy's sandbox and tries permitted and forbidden operations. Prints one line per
//! attempt: `name: ok`, or the error's number.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use clap::Args;
use holdfast_sdp::privileges::{RunAs, Sandbox};
use shared_maps::{
    lxc::{LxcKey, LxcValue},
    user::{Access, Globals, Map, MapError, MapKind, lxc_key},
};
use socket2::{Domain, Protocol, Socket, Type};

/// What the sandbox leaves.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Directory that may be read; holds `file`, which only root may read
    #[arg(long)]
    readable: PathBuf,
    /// Directory that may be written
    #[arg(long)]
    writable: PathBuf,
    /// Root of the BPF file system, with an lxc map
    #[arg(long)]
    bpf_root: PathBuf,
    /// A directory that is none of these; holds `file`, which anyone may read
    #[arg(long)]
    other: PathBuf,
    /// As whom
    #[arg(long, default_value_t)]
    user: RunAs,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let privileges = Sandbox {
        appendable: Vec::new(),
        user: options.user,
        readable: vec![options.readable.clone(), options.bpf_root.clone()],
        writable: vec![options.writable.clone()],
    }
    .enter()?;
    println!("{}", privileges.text());
    // Like the proxy's workers: threads inherit the rights of the first thread.
    let tried = std::thread::scope(|scope| scope.spawn(|| attempts(options)).join());
    for (name, outcome) in tried.expect("the attempts do not panic") {
        match outcome {
            Ok(()) => println!("{name}: ok"),
            Err(error) => println!("{name}: {}", error.raw_os_error().unwrap_or(-1)),
        }
    }
    Ok(())
}

fn attempts(options: &Options) -> Vec<(&'static str, io::Result<()>)> {
    let parent = nix::unistd::getppid();
    vec![
        ("read a file", read(&options.readable.join("file"))),
        (
            "read a setting",
            read("/proc/sys/kernel/random/boot_id".as_ref()),
        ),
        ("write a journal", journal(&options.writable)),
        ("read a map", map(options, Access::ReadOnly)),
        ("answer from port 53", reply_socket()),
        ("mark a query", marked()),
        ("raw socket", raw()),
        ("connect", connect()),
        ("read another file", read(&options.other.join("file"))),
        ("read passwords", read("/etc/shadow".as_ref())),
        (
            "write where it reads",
            fs::write(options.readable.join("new"), "x"),
        ),
        ("write a map", map(options, Access::ReadWrite)),
        ("make a map", make_map()),
        (
            "run a program",
            Command::new("/bin/true").status().map(drop),
        ),
        (
            "become root",
            io_result(nix::unistd::setuid(nix::unistd::Uid::from_raw(0))),
        ),
        (
            "another namespace",
            io_result(nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)),
        ),
        (
            "listen to the node",
            Socket::new(Domain::PACKET, Type::RAW, None).map(drop),
        ),
        (
            "end another's process",
            io_result(nix::sys::signal::kill(
                parent,
                nix::sys::signal::Signal::SIGWINCH,
            )),
        ),
    ]
}

fn io_result(outcome: nix::Result<()>) -> io::Result<()> {
    Ok(outcome?)
}

fn read(path: &Path) -> io::Result<()> {
    fs::read(path).map(drop)
}

fn journal(dir: &Path) -> io::Result<()> {
    fs::write(dir.join("a.next"), "x")?;
    fs::rename(dir.join("a.next"), dir.join("a"))?;
    fs::File::open(dir)?.sync_all()?;
    fs::remove_file(dir.join("a"))
}

/// Opens the lxc map with this access, and looks up an entry.
fn map(options: &Options, access: Access) -> io::Result<()> {
    let globals = Globals::new(&options.bpf_root);
    let tried = (|| -> Result<(), MapError> {
        let path = globals.path(shared_maps::lxc::NAME);
        let map: Map<LxcKey, LxcValue> = Map::open(&path, MapKind::Hash, access)?;
        map.get(&lxc_key("10.1.0.7".parse().expect("an address")))?;
        Ok(())
    })();
    tried.map_err(|error| match error {
        MapError::Syscall { source, .. } => source,
        other => io::Error::other(other),
    })
}

fn make_map() -> io::Result<()> {
    match Map::<u32, u32>::create("hf_probe", MapKind::Array, 1, 0) {
        Ok(_) => Ok(()),
        Err(MapError::Syscall { source, .. }) => Err(source),
        Err(other) => Err(io::Error::other(other)),
    }
}

fn reply_socket() -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_ip_transparent_v4(true)?;
    socket.bind(&SocketAddr::from(([127, 53, 0, 9], 53)).into())
}

fn marked() -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_mark(0x0b00)
}

fn raw() -> io::Result<()> {
    Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)).map(drop)
}

fn connect() -> io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    TcpStream::connect(listener.local_addr()?).map(drop)
}
