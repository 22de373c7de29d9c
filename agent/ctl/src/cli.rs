//! Client subcommands: requests to the running agent or to all agents of a cluster, and dumps of the
//! pinned maps.

pub(crate) mod bpf;
mod cluster;
mod handover;
mod identity;
mod netpol;
pub(crate) mod observe;
mod oci_hook;
pub(crate) mod policy;
mod render;
mod resolver;
pub(crate) mod show;
pub(crate) mod trace;
pub(crate) mod why;

use agent_core::core::snapshot::{EndpointView, IpcacheView, NameView, SelectorView};
use anyhow::{Result, bail};
use daemon::command_line::{
    failure,
    health::{Health, HealthArgs, Running, Versions},
    output::Output,
};
use holdfast_agent::{
    admin::{
        client::{Client, ClientError},
        model::{Done, Policies, Status},
        query::encode,
        standby::StandbyView,
    },
    cleanup::{self, Places},
    config::{
        args::{
            ClientArgs, Command, EndpointAddArgs, EndpointCommand, FqdnCacheCommand, FqdnCommand,
            IpCommand, PolicyCommand, SelectorsCommand,
        },
        cluster_command::ClusterCommand,
    },
    endpoint::source::EndpointDocument,
};

use self::show::print;

/// What an agent that is not ready lacks.
const SOURCES: &str = "policies or endpoints are not synced yet: `holdfast-agent status` names each source that \
                       cannot be read";

/// Carries out every command except `run`, `relay` and `netpol run`.
pub(crate) async fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(_) | Command::Relay(_) => Ok(()),
        Command::Cleanup(args) => {
            cleanup::enter(&args.host_root)?;
            cleanup::run(&Places {
                bpf_root: args.bpf_root,
                state_dir: args.state_dir,
                endpoint_store: args.endpoint_store,
                cni_conf_dir: Some(args.cni_conf_dir),
            })
            .await
        }
        Command::Status(args) => {
            let client = Client::new(args.client.admin_socket());
            let status: Status = match client.get("/v1/status").await {
                Ok(status) => status,
                Err(error) => return without_owner(&args.client, error).await,
            };
            print(args.client.output(), &status, |status| {
                show::status(status, args.verbose)
            })
        }
        Command::Handover(args) => handover::run(&args).await,
        Command::Health { what, client } => health(what, &client).await,
        Command::Version(args) => version(&args).await,
        Command::Endpoint(command) => endpoint(command).await,
        Command::Policy(PolicyCommand::Get(args)) => {
            let policies: Policies = Client::new(args.admin_socket()).get("/v1/policies").await?;
            print(args.output(), &policies, show::policies)
        }
        Command::Policy(PolicyCommand::Validate {
            files,
            pruned,
            form,
        }) => policy::validate(&files, pruned, form.output),
        Command::Policy(PolicyCommand::Trace(args)) => trace::run(&args).await,
        Command::Policy(PolicyCommand::Render(args)) => render::run(&args),
        Command::Identity(command) => identity::run(command).await,
        Command::Ip(command) => ip(command).await,
        Command::Selectors(SelectorsCommand::List(args)) => {
            let selectors: Vec<SelectorView> = Client::new(args.admin_socket())
                .get("/v1/selectors")
                .await?;
            print(args.output(), &selectors, |list| show::selectors(list))
        }
        Command::Fqdn(command) => fqdn(command).await,
        Command::Resolver(command) => resolver::run(command).await,
        Command::Bpf(command) => bpf::run(&command).await,
        Command::Observe(args) => observe::run(&args).await,
        Command::Why(args) => why::run(&args).await,
        Command::Cluster(ClusterCommand::Status(args)) => cluster::status(args).await,
        Command::OciHook(args) => oci_hook::run(&args).await,
        Command::Netpol(command) => netpol::run(command).await,
    }
}

async fn endpoint(command: EndpointCommand) -> Result<()> {
    match command {
        EndpointCommand::List(args) => {
            let endpoints = endpoints(&args).await?;
            print(args.output(), &endpoints, |list| show::endpoints(list))
        }
        EndpointCommand::Get { endpoint, client } => {
            let agent = Client::new(client.admin_socket());
            let endpoint = called(&agent, &endpoint.endpoint).await?;
            print(client.output(), &endpoint, show::endpoint)
        }
        EndpointCommand::Add(args) => add(args).await,
        EndpointCommand::Remove { endpoint, client } => {
            let path = format!("/v1/endpoints?endpoint={}", encode(&endpoint.endpoint));
            let done: Done = Client::new(client.admin_socket()).delete(&path).await?;
            print(client.output(), &done, |done| done.message.clone())
        }
    }
}

/// The endpoint with this name or number.
async fn called(client: &Client, text: &str) -> Result<EndpointView> {
    let path = format!("/v1/endpoint?called={}", encode(text));
    Ok(client.get(&path).await?)
}

/// The number of the endpoint with this name. A text that is a number may name a former endpoint.
pub(crate) async fn number_of(client: &Client, text: &str) -> Result<u16> {
    match text.parse() {
        Ok(number) => Ok(number),
        Err(_) => Ok(called(client, text).await?.id),
    }
}

/// Shows what the standby knows if its owner does not answer. Fails with the owner's error.
async fn without_owner(args: &ClientArgs, error: ClientError) -> Result<()> {
    if let Some(standby) = StandbyView::beside(args.admin_socket()).await {
        print(args.output(), &standby, show::standby)?;
    }
    Err(error.into())
}

async fn health(what: HealthArgs, args: &ClientArgs) -> Result<()> {
    let status: Status = Client::new(args.admin_socket()).get("/v1/status").await?;
    let health = match (what.live, status.ready) {
        (true, _) => Health::live(),
        (false, healthy) => Health {
            healthy,
            missing: match healthy {
                true => Vec::new(),
                false => vec![SOURCES.to_owned()],
            },
        },
    };
    show_health(args.output(), &health)
}

/// Prints the health; fails if the program is not healthy.
pub(crate) fn show_health(output: Output, health: &Health) -> Result<()> {
    print(output, health, Health::text)?;
    if !health.healthy {
        bail!("not ready: {}", health.missing.join("; "));
    }
    Ok(())
}

/// Shows versions. The client's version is shown even if no agent runs.
async fn version(args: &ClientArgs) -> Result<()> {
    let client = Client::new(args.admin_socket());
    let status: Option<Status> = client.get("/v1/status").await.ok();
    let running = status.map(|status| Running {
        name: "holdfast-agent".to_owned(),
        pid: status.pid,
        version: status.version,
    });
    let versions = Versions {
        program: "holdfast-agent",
        version: env!("CARGO_PKG_VERSION"),
        running: running.into_iter().collect(),
    };
    print(args.output(), &versions, Versions::text)
}

async fn endpoints(args: &ClientArgs) -> Result<Vec<EndpointView>> {
    Ok(Client::new(args.admin_socket())
        .get("/v1/endpoints")
        .await?)
}

async fn add(args: EndpointAddArgs) -> Result<()> {
    let document = EndpointDocument {
        netns: args.netns,
        pid: args.pid,
        container: None,
        interface: None,
        bridge: None,
        process: None,
        ifname: args.ifname,
        labels: args.labels,
        pod: args.pod,
        named_ports: args.named_ports,
        addresses: args.addresses,
        enable_policy: args.enable_policy,
        uid: None,
        taken_in: None,
    };
    let client = Client::new(args.client.admin_socket());
    let before = endpoints(&args.client).await?;
    let endpoint: EndpointView = client.post("/v1/endpoints", &document).await?;
    if let Some(before) = before.iter().find(|before| before.key == endpoint.key) {
        failure::note("holdfast-agent", &show::replaced(before, &endpoint));
    }
    print(args.client.output(), &endpoint, show::endpoint)
}

async fn ip(command: IpCommand) -> Result<()> {
    let (address, args) = match command {
        IpCommand::List(args) => (None, args),
        IpCommand::Get { address, client } => (Some(address), client),
    };
    let prefixes: Vec<IpcacheView> = Client::new(args.admin_socket()).get("/v1/ipcache").await?;
    let Some(address) = address else {
        return print(args.output(), &prefixes, |list| show::prefixes(list));
    };
    let covering = prefixes
        .iter()
        .filter_map(|view| Some((view.prefix.parse::<ipnet::IpNet>().ok()?, view)))
        .filter(|(prefix, _)| prefix.contains(&address))
        .max_by_key(|(prefix, _)| prefix.prefix_len());
    match covering {
        Some((_, view)) => print(args.output(), view, |one| {
            show::prefixes(std::slice::from_ref(one))
        }),
        None => bail!("no prefix covers {address}: it has the world identity of its family"),
    }
}

async fn fqdn(command: FqdnCommand) -> Result<()> {
    match command {
        FqdnCommand::Cache(FqdnCacheCommand::List(args)) => {
            let names: Vec<NameView> = Client::new(args.admin_socket()).get("/v1/names").await?;
            print(args.output(), &names, |list| show::names(list))
        }
        FqdnCommand::Cache(FqdnCacheCommand::Clean {
            matchpattern,
            client,
        }) => {
            let path = match matchpattern {
                Some(pattern) => format!("/v1/names?pattern={}", encode(&pattern)),
                None => "/v1/names".to_owned(),
            };
            let done: Done = Client::new(client.admin_socket()).delete(&path).await?;
            print(client.output(), &done, |done| done.message.clone())
        }
        FqdnCommand::Names(args) => {
            let mut selectors: Vec<SelectorView> = Client::new(args.admin_socket())
                .get("/v1/selectors")
                .await?;
            selectors.retain(|selector| selector.kind == "fqdn");
            print(args.output(), &selectors, |list| show::selectors(list))
        }
    }
}
