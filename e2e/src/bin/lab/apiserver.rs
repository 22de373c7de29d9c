//! The API server of the tests, run by hand.

use std::io::BufRead as _;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use holdfast_e2e::apiserver::{ApiServer, Options, Refusal};

/// Runs an API server of Kubernetes in memory.
///
/// Writes DIR/kubeconfig (the agent's), DIR/admin.kubeconfig, DIR/ca.crt and DIR/token. Each line
/// on stdin is a command: `put FILE`, `delete PLURAL [NAMESPACE/]NAME`, `away`, `back`,
/// `hold PLURAL`, `release PLURAL`, `break PLURAL`, `expire PLURAL`, `forbid PLURAL`,
/// `unserve PLURAL`, `busy PLURAL COUNT`, `allow PLURAL`, `expire-token`, `rotate-token NUMBER`,
/// `requests`. It ends when stdin does.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory for the files of clients
    #[arg(long)]
    dir: PathBuf,
    /// Address to listen at; port 0 is any
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Roles, bindings and CRDs, as `helm template` prints them, in place of the built-in ones
    #[arg(long)]
    roles: Option<PathBuf>,
    /// ServiceAccount of the agent, NAMESPACE/NAME
    #[arg(long, default_value = "kube-system/holdfast-agent")]
    account: String,
    /// YAML files of objects to begin with
    #[arg(long)]
    objects: Vec<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut options = Options::default();
    if let Some(roles) = &arguments.roles {
        options = options.with_documents(&read(roles)?)?;
    }
    let account = arguments.account.split_once('/');
    let (namespace, name) = account.context("--account is no NAMESPACE/NAME")?;
    options.account = (namespace.to_owned(), name.to_owned());
    let server = ApiServer::start_at(None, arguments.listen, &arguments.dir, options)?;
    for file in &arguments.objects {
        server.put_yaml(&read(file)?)?;
    }
    println!("{}", server.url());
    println!(
        "agent: --kubeconfig {}",
        server.files().kubeconfig.display()
    );
    println!("kubectl --kubeconfig {}", server.files().admin.display());
    for line in std::io::stdin().lock().lines() {
        match carry_out(&server, &line?) {
            Ok(()) => println!("done"),
            Err(error) => println!("failed: {error:#}"),
        }
    }
    Ok(())
}

fn carry_out(server: &ApiServer, line: &str) -> Result<()> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        [] => {}
        ["put", file] => server.put_yaml(&read(&PathBuf::from(file))?)?,
        ["delete", plural, object] => {
            let (namespace, name) = object.split_once('/').unwrap_or(("", object));
            server.delete(plural, namespace, name)?;
        }
        ["away"] => server.away(),
        ["back"] => server.back()?,
        ["hold", plural] => server.hold(plural)?,
        ["release", plural] => server.release(plural)?,
        ["break", plural] => server.break_streams(plural)?,
        ["expire", plural] => server.expire(plural)?,
        ["forbid", plural] => server.refuse(plural, Refusal::Forbidden)?,
        ["unserve", plural] => server.refuse(plural, Refusal::NotServed)?,
        ["busy", plural, count] => server.refuse(plural, Refusal::TooMany(count.parse()?))?,
        ["allow", plural] => server.allow(plural)?,
        ["expire-token"] => server.expire_token(),
        ["rotate-token", number] => server.rotate_token(number.parse()?)?,
        ["requests"] => {
            for request in server.answered() {
                println!("{request:?}");
            }
        }
        _ => bail!("unknown command {line:?}; see --help"),
    }
    Ok(())
}

fn read(file: &PathBuf) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))
}
