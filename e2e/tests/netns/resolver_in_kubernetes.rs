//! DNSNameResolvers in the Kubernetes API, written by several agents: no observation is lost, one agent
//! at a time leads, and an agent that only consumes writes nothing.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use agent_cluster::{ApiSettings, api::client::Api};
use anyhow::{Context as _, Result, ensure};
use dns_policy::name::Fqdn;
use holdfast_agent::resolver::{
    object::{ObjectKey, Settings, UnixTime},
    observe::{Outcome, observe},
    store::{
        Created, ResolverStore, Role, StoreHealth, Updated,
        feed::Feed,
        kube::{Access, KubeSettings, KubeStore},
    },
};
use holdfast_e2e::apiserver::{ApiServer, NAMESPACE, Options};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const OBSERVATIONS: u8 = 200;
/// Number of observations that one agent writes at the same time.
const AT_ONCE: usize = 4;
/// Maximum number of attempts to write one observation: more than there are other writes.
const ATTEMPTS: u32 = 1000;
/// Time at which all answers arrived, in every observation.
const NOW: UnixTime = UnixTime(1_800_000_000);
const SOON: Duration = Duration::from_secs(60);
const WILDCARD: &str = "*.example.org.";

fn with_server<F: Future<Output = Result<()>>>(
    options: Options,
    test: impl FnOnce(Arc<ApiServer>) -> F,
) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let server = Arc::new(ApiServer::start(None, directory.path(), options)?);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(test(server))
}

async fn store(server: &ApiServer, node: &str, access: Access) -> Result<Arc<KubeStore>> {
    let settings = ApiSettings {
        kubeconfig: Some(server.files().kubeconfig.clone()),
        server: None,
    };
    let api = Api::connect(&settings).await?;
    let settings = KubeSettings {
        namespace: NAMESPACE.to_owned(),
        node: node.to_owned(),
        lease: Duration::from_secs(3),
        access,
    };
    let feed = Arc::new(Feed::new(NAMESPACE));
    Ok(Arc::new(KubeStore::new(api, feed, settings)))
}

fn key() -> ObjectKey {
    ObjectKey {
        namespace: NAMESPACE.to_owned(),
        name: "dns-1".to_owned(),
    }
}

/// Adds what one query learned. Tries again while other writers are faster. Returns the number of conflicts.
async fn write(store: &KubeStore, name: &Fqdn, address: IpAddr) -> Result<u32> {
    let spec = Fqdn::normalise(WILDCARD);
    let found = Outcome::Found(vec![(address, 300)]);
    for conflicts in 0..ATTEMPTS {
        let object = store.get(&key()).await?.context("no object")?;
        let settings = Settings::default();
        let change = observe(&object.status, &spec, name, &found, NOW, &settings);
        let Some(status) = change.status else {
            return Ok(conflicts);
        };
        match store
            .update_status(&key(), &object.version, &status)
            .await?
        {
            Updated::Done(_) => return Ok(conflicts),
            Updated::Conflict => {}
            Updated::Gone => anyhow::bail!("the object is gone"),
        }
    }
    anyhow::bail!("{name} is not written after {ATTEMPTS} attempts")
}

fn addresses(server: &ApiServer) -> Result<BTreeSet<String>> {
    let object = server.get("dnsnameresolvers", NAMESPACE, "dns-1")?;
    let object = object.context("no object")?;
    let names = object["status"]["resolvedNames"].as_array();
    let of = |name: &Value| name["resolvedAddresses"].as_array().cloned();
    let all = names.into_iter().flatten().filter_map(of).flatten();
    Ok(all
        .map(|one| one["ip"].as_str().unwrap_or_default().to_owned())
        .collect())
}

#[test]
fn two_hundred_parallel_observations_of_two_agents_are_all_in_the_object() -> Result<()> {
    with_server(Options::with_resolver(), async |server| {
        let stores = [
            store(&server, "n1", Access::Write).await?,
            store(&server, "n2", Access::Write).await?,
        ];
        let made = stores[0].create(&key(), &Fqdn::normalise(WILDCARD)).await?;
        ensure!(matches!(made, Created::Done(_)), "{made:?}");
        let again = stores[1].create(&key(), &Fqdn::normalise(WILDCARD)).await?;
        ensure!(again == Created::Exists, "{again:?}");
        // These conflicts add to the conflicts that parallel writers cause.
        server.conflict("dnsnameresolvers", 3)?;
        let mut writers = JoinSet::new();
        let limits = [0, 1].map(|_| Arc::new(Semaphore::new(AT_ONCE)));
        for n in 0..OBSERVATIONS {
            let agent = usize::from(n % 2);
            let (store, limit) = (Arc::clone(&stores[agent]), Arc::clone(&limits[agent]));
            let name = Fqdn::normalise(&format!("sub{n}.example.org"));
            let address = IpAddr::from(Ipv4Addr::new(192, 0, 2, n));
            writers.spawn(async move {
                let _place = limit.acquire().await?;
                write(&store, &name, address).await
            });
        }
        let mut conflicts = 0;
        while let Some(written) = writers.join_next().await {
            conflicts += written??;
        }
        let wanted: BTreeSet<String> = (0..OBSERVATIONS).map(|n| format!("192.0.2.{n}")).collect();
        let found = addresses(&server)?;
        ensure!(found == wanted, "lost: {:?}", wanted.difference(&found));
        ensure!(conflicts > 0, "nothing was written in parallel");
        // The same observation again changes nothing, so that nothing is written.
        server.forget_answered();
        let name = Fqdn::normalise("sub7.example.org");
        write(&stores[1], &name, Ipv4Addr::new(192, 0, 2, 7).into()).await?;
        let verbs: Vec<_> = server.answered().iter().map(|one| one.verb).collect();
        ensure!(verbs == ["get"], "{verbs:?}");
        Ok(())
    })
}

/// An agent that seeks to lead, until it is stopped or killed.
struct Seeker {
    role: watch::Receiver<Role>,
    stop: CancellationToken,
    task: tokio::task::AbortHandle,
}

fn seek(tasks: &TaskTracker, store: Arc<KubeStore>) -> Seeker {
    let (send, role) = watch::channel(Role::Follows);
    let stop = CancellationToken::new();
    let of_task = stop.clone();
    let task = tasks.spawn(async move { store.lead(send, of_task).await });
    Seeker {
        role,
        stop,
        task: task.abort_handle(),
    }
}

fn holder(server: &ApiServer) -> Result<String> {
    let lease = server.get("leases", NAMESPACE, "holdfast-resolver")?;
    let lease = lease.context("no Lease")?;
    Ok(lease["spec"]["holderIdentity"]
        .as_str()
        .unwrap_or_default()
        .to_owned())
}

async fn until(seeker: &mut Seeker, role: Role) -> Result<()> {
    let came = seeker.role.wait_for(|now| *now == role);
    tokio::time::timeout(SOON, came)
        .await
        .context("the role stays")??;
    Ok(())
}

#[test]
fn one_agent_leads_and_another_continues_after_it_was_killed_or_stopped() -> Result<()> {
    with_server(Options::with_resolver(), async |server| {
        let tasks = TaskTracker::new();
        let (one, two) = (
            store(&server, "n1", Access::Write).await?,
            store(&server, "n2", Access::Write).await?,
        );
        let mut first = seek(&tasks, Arc::clone(&one));
        until(&mut first, Role::Leads).await?;
        let mut second = seek(&tasks, two);
        // The second has seen the Lease of the first, more than once.
        let asked = async || {
            let answered = server.answered().into_iter();
            answered
                .filter(|one| one.resource == "leases" && one.verb == "get")
                .count()
        };
        polling::until_awaited("both ask for the Lease", asked, |asked| *asked > 6).await;
        ensure!(*first.role.borrow() == Role::Leads && *second.role.borrow() == Role::Follows);
        ensure!(holder(&server)? == "n1");

        // The first agent is killed: it does not release the Lease.
        first.task.abort();
        until(&mut second, Role::Leads).await?;
        ensure!(holder(&server)? == "n2");

        // The second agent is stopped: the Lease is free at once.
        second.stop.cancel();
        until(&mut second, Role::Follows).await?;
        let mut first = seek(&tasks, one);
        until(&mut first, Role::Leads).await?;

        // A leader without the server stops before another may lead, and leads again afterwards.
        server.refuse("leases", holdfast_e2e::apiserver::Refusal::Unavailable)?;
        until(&mut first, Role::Follows).await?;
        server.allow("leases")?;
        until(&mut first, Role::Leads).await?;
        first.stop.cancel();
        tasks.close();
        tasks.wait().await;
        ensure!(holder(&server)?.is_empty());
        Ok(())
    })
}

#[test]
fn an_agent_that_only_consumes_writes_nothing() -> Result<()> {
    // The account has the resolver's rights: the store itself refuses to write.
    with_server(Options::with_resolver(), async |server| {
        let store = store(&server, "n1", Access::Consume).await?;
        let tasks = TaskTracker::new();
        let seeker = seek(&tasks, Arc::clone(&store));
        let name = Fqdn::normalise("www.example.org");
        ensure!(store.create(&key(), &name).await.is_err());
        server.put(json!({
            "apiVersion": "network.openshift.io/v1alpha1", "kind": "DNSNameResolver",
            "metadata": {"namespace": NAMESPACE, "name": "dns-1"}, "spec": {"name": WILDCARD},
        }))?;
        let address = Ipv4Addr::new(192, 0, 2, 1).into();
        let sub = Fqdn::normalise("sub.example.org");
        ensure!(write(&store, &sub, address).await.is_err());
        ensure!(store.delete(&key()).await.is_err());
        seeker.stop.cancel();
        tasks.close();
        tasks.wait().await;
        let reads = ["get", "list", "watch"];
        let answered = server.answered();
        ensure!(
            answered
                .iter()
                .all(|one| reads.contains(&one.verb) && one.resource != "leases"),
            "{answered:?}"
        );
        Ok(())
    })
}

#[test]
fn a_right_that_the_chart_does_not_give_is_named_by_the_store() -> Result<()> {
    with_server(Options::default(), async |server| {
        let store = store(&server, "n1", Access::Write).await?;
        let tasks = TaskTracker::new();
        let seeker = seek(&tasks, Arc::clone(&store));
        let (changes, _received) = mpsc::channel(1);
        let (send, mut health) = watch::channel(StoreHealth::default());
        let watched = Arc::clone(&store);
        let stop = seeker.stop.clone();
        tasks.spawn(async move { watched.watch(changes, send, stop).await });
        let refused = store
            .create(&key(), &Fqdn::normalise("www.example.org"))
            .await;
        let reason = refused.err().context("it was made")?.to_string();
        for words in ["403", "create dnsnameresolvers", "resolver.mode kube"] {
            ensure!(reason.contains(words), "no {words:?} in {reason}");
        }
        let named = health.wait_for(|health| health.problems == [reason.clone()]);
        let named = tokio::time::timeout(SOON, named).await;
        named.context("the problem is not reported")??;
        seeker.stop.cancel();
        tasks.close();
        tasks.wait().await;
        Ok(())
    })
}
