//! kubectl as a child process, with bounds on its time and its output.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use holdfast_agent::config::cluster_command::ClusterStatusArgs;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time,
};

use super::answer::clean;

/// A listing of 5,000 nodes with their images has about 80 MB.
const LISTING: Bound = Bound {
    bytes: 256 << 20,
    time: Duration::from_secs(60),
};
/// Maximum bytes of an agent's answer.
const ANSWER_BYTES: usize = 4 << 20;
/// Maximum bytes of error output that are kept.
const ERROR_BYTES: usize = 4 << 10;
/// How the last line of a failed `kubectl exec` begins. That line gives no reason.
const EXIT_LINE: &str = "command terminated with exit code";

/// Limits of one run of kubectl.
#[derive(Clone, Copy)]
struct Bound {
    bytes: usize,
    time: Duration,
}

/// The program, with its arguments that name the cluster.
pub(super) struct Kubectl {
    program: PathBuf,
    place: Vec<OsString>,
    namespace: String,
    timeout: Duration,
}

impl Kubectl {
    pub(super) fn new(args: ClusterStatusArgs) -> Self {
        let mut place = vec![OsString::from(format!("--namespace={}", args.namespace))];
        if let Some(file) = args.kubeconfig {
            let mut flag = OsString::from("--kubeconfig=");
            flag.push(file);
            place.push(flag);
        }
        let context = args.context.map(|name| format!("--context={name}"));
        place.extend(context.map(OsString::from));
        Self {
            program: args.kubectl,
            place,
            namespace: args.namespace,
            timeout: args.timeout,
        }
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Runs a command whose output comes from the API server.
    pub(super) async fn list(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        self.run(arguments, LISTING).await
    }

    /// Runs a command whose output comes from a pod.
    pub(super) async fn answer(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        let bound = Bound {
            bytes: ANSWER_BYTES,
            time: self.timeout,
        };
        self.run(arguments, bound).await
    }

    async fn run(&self, arguments: &[&str], bound: Bound) -> Result<Vec<u8>> {
        let mut child = Command::new(&self.program)
            .args(&self.place)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {} (--kubectl)", self.program.display()))?;
        let stdout = child.stdout.take().context("no standard output")?;
        let stderr = child.stderr.take().context("no error output")?;
        let ends = async {
            tokio::try_join!(
                whole(stdout, bound.bytes),
                beginning(stderr, ERROR_BYTES),
                async { Ok(child.wait().await?) },
            )
        };
        let Ok(ended) = time::timeout(bound.time, ends).await else {
            bail!("no answer within {:?}", bound.time);
        };
        let (output, errors, status) = ended?;
        if !status.success() {
            bail!(reason(&errors, status));
        }
        Ok(output)
    }
}

/// Reads a whole stream. Fails if it is longer than `most` bytes.
async fn whole(stream: impl AsyncRead + Unpin, most: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut stream = stream.take(most as u64 + 1);
    stream.read_to_end(&mut bytes).await?;
    if bytes.len() > most {
        bail!("the answer has more than {most} bytes");
    }
    Ok(bytes)
}

/// Reads a stream to its end, so that the writer does not wait, and keeps the first bytes.
async fn beginning(mut stream: impl AsyncRead + Unpin, most: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    (&mut stream)
        .take(most as u64)
        .read_to_end(&mut bytes)
        .await?;
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    Ok(bytes)
}

/// Why kubectl failed: its error output, else its exit status.
fn reason(errors: &[u8], status: ExitStatus) -> String {
    let errors = String::from_utf8_lossy(errors);
    let lines = errors.lines().map(str::trim);
    // kubectl's log lines repeat what its last line says in plain words.
    let is_log = |line: &str| line.starts_with('E') && line.contains(".go:");
    let lines =
        lines.filter(|line| !line.is_empty() && !line.starts_with(EXIT_LINE) && !is_log(line));
    let text = clean(&lines.collect::<Vec<_>>().join("; "));
    if text.is_empty() {
        return format!("kubectl ended with {status}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn the_reason_is_what_kubectl_wrote_without_its_last_line() {
        let failed = ExitStatus::from_raw(1 << 8);
        let errors =
            b"holdfast-agent: no agent\x1b[2J answers\ncommand terminated with exit code 1\n";
        assert_eq!(
            reason(errors, failed),
            "holdfast-agent: no agent [2J answers"
        );
        assert_eq!(reason(b"\n", failed), "kubectl ended with exit status: 1");
        let logged = b"E1127 19:55:42.247410 583 memcache.go:265] \"Unhandled Error\"\nThe connection was refused\n";
        assert_eq!(reason(logged, failed), "The connection was refused");
    }

    #[tokio::test]
    async fn output_is_bounded() {
        assert_eq!(whole(&b"four"[..], 4).await.unwrap(), b"four");
        assert!(whole(&b"fives"[..], 4).await.is_err());
        assert_eq!(beginning(&b"fives"[..], 4).await.unwrap(), b"five");
    }
}
