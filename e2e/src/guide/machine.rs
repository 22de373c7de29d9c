//! A machine for a page: it has its own network, mount and process namespaces, so that the programs
//! can use their default paths. Outside of it is a world with DNS servers.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::dns::server::DnsServer;
use crate::dns::zone::Zone;
use crate::netns::Netns;
use crate::wait::eventually;
use crate::web::Web;
use crate::{config, shell};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// DNS servers of the pages.
const SERVERS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(9, 9, 9, 9)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53)),
];

/// Longest time of a command.
const ENDS: Duration = Duration::from_secs(90);

/// Longest wait for the end of the shell after its last command.
const SHELL_ENDS: Duration = Duration::from_secs(10);

/// Gives the machine its own versions of the directories to which the programs write by default.
/// Then runs the commands whose numbers it reads, in this one shell. `$1` is the machine's
/// directory.
const DRIVER: &str = r#"
set -e
cp -a /etc "$1/etc"
mount --bind "$1/etc" /etc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t bpf bpf /sys/fs/bpf
cd "$1/work"
set +e
machine=$1
set --
touch "$machine/ready"
while IFS= read -r machine_command; do
    eval "$(<"$machine/command.$machine_command")" \
        >"$machine/out.$machine_command" 2>"$machine/err.$machine_command" </dev/null
    echo $? >"$machine/rc.part"
    mv "$machine/rc.part" "$machine/rc.$machine_command"
done
"#;

/// A running machine. Dropping it ends everything on it.
#[derive(Debug)]
pub struct Machine {
    /// Records of the DNS servers.
    pub zone: Zone,
    bash: Child,
    commands: Option<ChildStdin>,
    count: u32,
    directory: PathBuf,
    // Dropped in this order: the servers stop before their namespaces are deleted.
    web: Option<Web>,
    _dns: DnsServer,
    _node: Netns,
    world: Netns,
}

/// A command that has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: i32,
    /// Standard output of the command, and of background programs that it started, so far.
    pub stdout: String,
    /// Standard error of the same programs.
    pub stderr: String,
}

impl Machine {
    /// Starts a machine. The built programs are in `target/debug` of its working directory.
    pub fn start() -> Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("hf-guide-{}-{number}", std::process::id());
        let node = Netns::create(format!("{name}-node"))?;
        let world = Netns::create(format!("{name}-world"))?;
        connect(&node, &world)?;
        let zone = Zone::default();
        let dns = DnsServer::start(&world, &SERVERS, &zone)?;

        let directory = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(directory.join("work/target"))?;
        let agent = config::program("holdfast-agent")?;
        config::program("holdfast-sdp")?;
        let programs = agent.parent().context("directory of the programs")?;
        std::os::unix::fs::symlink(programs, directory.join("work/target/debug"))?;

        let mut command = node.command("unshare");
        command
            .args(["--mount", "--propagation=private", "--pid", "--fork"])
            .args(["--kill-child", "--mount-proc", "--"])
            .args(["bash", "--noprofile", "--norc", "-c", DRIVER, "machine"])
            .arg(&directory);
        let mut bash = spawn(&mut command, &directory)?;
        let commands = bash.stdin.take();
        let mut machine = Self {
            zone,
            bash,
            commands,
            count: 0,
            directory,
            web: None,
            _dns: dns,
            _node: node,
            world,
        };
        machine.wait_for("ready")?;
        Ok(machine)
    }

    /// A server in the world that accepts TCP connections.
    pub fn serve(&mut self, address: IpAddr, ports: &[u16]) -> Result<()> {
        self.world
            .batch(&format!("address add {address}/32 dev lo"))?;
        self.web = Some(Web::start(&self.world, &[], ports, &[])?);
        Ok(())
    }

    /// Writes a file of the working directory.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join("work").join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Runs a command in the shell and waits for its end.
    pub fn run(&mut self, text: &str) -> Result<Ended> {
        self.count += 1;
        let number = self.count;
        std::fs::write(self.file("command", number), text)?;
        let commands = self.commands.as_mut().context("the shell has ended")?;
        writeln!(commands, "{number}").context("the shell has ended")?;
        commands.flush()?;
        let waited = self.wait_for(&format!("rc.{number}"));
        let read = |kind| std::fs::read(self.file(kind, number)).unwrap_or_default();
        let text = |kind| String::from_utf8_lossy(&read(kind)).into_owned();
        let (stdout, stderr) = (text("out"), text("err"));
        waited.with_context(|| format!("it printed so far:\n{stdout}{stderr}"))?;
        Ok(Ended {
            status: text("rc").trim().parse().context("exit status")?,
            stdout,
            stderr,
        })
    }

    /// Runs a command that belongs to the test, not to the page.
    pub fn prepare(&mut self, text: &str) -> Result<()> {
        let ended = self.run(text)?;
        ensure!(ended.status == 0, "{text}: {ended:?}");
        Ok(())
    }

    /// Prints the end of each command's output.
    pub fn print_logs(&self) {
        for number in 1..=self.count {
            let text = |kind| std::fs::read(self.file(kind, number)).unwrap_or_default();
            eprintln!("--- $ {}", String::from_utf8_lossy(&text("command")));
            for kind in ["out", "err"] {
                let bytes = text(kind);
                let text = String::from_utf8_lossy(&bytes);
                let lines: Vec<&str> = text.lines().collect();
                for line in lines
                    .get(lines.len().saturating_sub(40)..)
                    .unwrap_or_default()
                {
                    eprintln!("{line}");
                }
            }
        }
    }

    fn file(&self, kind: &str, number: u32) -> PathBuf {
        self.directory.join(format!("{kind}.{number}"))
    }

    fn wait_for(&mut self, file: &str) -> Result<()> {
        let path = self.directory.join(file);
        let log = self.directory.join("driver.log");
        let bash = &mut self.bash;
        eventually("the command ends", ENDS, || {
            if let Some(status) = bash.try_wait()? {
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                return Ok(Err(anyhow::anyhow!("the shell ended: {status}: {log}")));
            }
            ensure!(path.exists(), "it still runs");
            Ok(Ok(()))
        })?
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The shell ends at the end of its input. It is the first process of its namespace, so the
        // kernel ends all other processes of the namespace with it.
        self.commands.take();
        let ended = eventually("the shell ends", SHELL_ENDS, || {
            self.bash.try_wait()?.context("still running")
        });
        if ended.is_err() {
            let _ = self.bash.kill();
            let _ = self.bash.wait();
        }
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("left behind: {}: {error}", self.directory.display());
        }
    }
}

fn spawn(command: &mut Command, directory: &Path) -> Result<Child> {
    let log = std::fs::File::create(directory.join("driver.log"))?;
    command
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {command:?}"))
}

fn connect(node: &Netns, world: &Netns) -> Result<()> {
    shell::run(
        "ip",
        &[
            "link",
            "add",
            "up0",
            "netns",
            node.name(),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            world.name(),
        ],
    )?;
    node.batch(
        "address add 198.18.0.1/24 dev up0\n\
         link set up0 up\n\
         route add default via 198.18.0.2",
    )?;
    let mut lines = String::from("address add 198.18.0.2/24 dev eth0\nlink set eth0 up\n");
    for server in SERVERS {
        lines.push_str(&format!("address add {server}/32 dev lo\n"));
    }
    world.batch(&lines)
}
