//! Requests to the admin socket by the command line's own client.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use agent_core::{
    core::snapshot::{EndpointView, IpcacheView, NameView},
    policy::document::Body,
};
use agent_datapath::upkeep::Conditions;
use daemon::http_server::Admission;
use holdfast_agent::{
    admin::{
        client::{Client, ClientError},
        model::{Done, Policies, Status},
        query::encode,
        server::Admin,
        standby::Succession,
    },
    endpoint::{
        container::Containers,
        source::{EndpointBook, EndpointDocument, cli::CliFile},
    },
    events::Events,
    grpc::peer,
    owner::OwnerRecord,
};

use shared_maps::user::Globals;

use crate::lab::{Lab, mapping, pod, policy};

fn serve(lab: &Lab) -> Client {
    let socket = lab.dir.path().join("run/admin.sock");
    let listener = peer::bind(&socket, None).unwrap();
    let endpoints = EndpointBook::open(
        None,
        CliFile::in_dir(lab.dir.path()),
        Containers::of(lab.dir.path()),
        Vec::new(),
        None,
        |_| {},
    )
    .unwrap();
    let admin = Admin {
        directories: Vec::new(),
        cni: holdfast_agent::cni::install::CniCondition::default(),
        core: lab.core.clone(),
        proxies: lab.proxies.clone(),
        endpoints,
        epoch: lab.epoch.clone(),
        // Proxies had the time to connect.
        started: Instant::now().checked_sub(Duration::from_secs(60)).unwrap(),
        events: Events::default(),
        maps: Globals::new(lab.dir.path()),
        builtin: Arc::new(|| "disabled".to_owned()),
        damaged: Arc::new(vec!["a file is damaged".to_owned()]),
        state_dir: lab.dir.path().to_owned(),
        succession: Succession::new(OwnerRecord::default(), &socket, false),
        conditions: Conditions::default(),
        cluster: None,
        resolver: None,
        identities: None,
        tunnel: None,
        few_descriptors: None,
    };
    lab.tasks.spawn(admin.serve(
        listener,
        Admission::default(),
        lab.tasks.clone(),
        lab.stop.clone(),
    ));
    Client::new(&socket)
}

#[tokio::test]
async fn dumps_show_the_policy_in_force() {
    let lab = Lab::start();
    let client = serve(&lab);
    let status: Status = client.get("/v1/status").await.unwrap();
    assert!(!status.ready);
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let status: Status = client.get("/v1/status").await.unwrap();
    assert!(status.ready);
    assert_eq!((status.summary.endpoints, status.summary.policies), (1, 1));
    assert!(
        status
            .problems
            .iter()
            .any(|p| p.contains("a file is damaged"))
    );
    assert!(status.problems.iter().any(|p| p.contains("no DNS proxy")));
    let endpoints: Vec<EndpointView> = client.get("/v1/endpoints").await.unwrap();
    assert!(endpoints[0].egress_enforced);
    let policies: Policies = client.get("/v1/policies").await.unwrap();
    assert_eq!(policies.policies.len(), 1);
}

#[tokio::test]
async fn a_proxy_with_another_state_directory_is_a_problem() {
    let lab = Lab::start();
    let client = serve(&lab);
    let hello = fqdn_proto::native::HelloRequest {
        instance: "one".to_owned(),
        proxy_port: 10094,
        state_dir: Some(fqdn_proto::native::StateDir {
            path: "/var/run/other".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut proxy = lab.connect().await;
    proxy.hello(hello).await.unwrap();
    let _stream = crate::lab::Mappings::open(proxy).await.unwrap();
    let status: Status = client.get("/v1/status").await.unwrap();
    let own = format!("--state-dir {}", lab.dir.path().display());
    let parts = ["proxy one", "--state-dir /var/run/other", own.as_str()];
    let is_named = |problem: &&String| parts.iter().all(|part| problem.contains(part));
    let named = status.problems.iter().filter(is_named).count();
    assert_eq!(named, 1, "{:?}", status.problems);
}

#[tokio::test]
async fn names_that_no_proxy_learns_are_a_warning() {
    let lab = Lab::start();
    let client = serve(&lab);
    let mut named = policy("*.example.com");
    let Body::Rules(rules) = &mut named.body else {
        panic!("{named:?}");
    };
    rules[0]
        .egress
        .peers
        .retain(|rule| rule.ports.iter().all(|port| port.dns.is_none()));
    lab.sync(vec![named], vec![pod()]).await;
    let status: Status = client.get("/v1/status").await.unwrap();
    let said = |part: &str| status.warnings.iter().any(|warning| warning.contains(part));
    assert!(
        said("without any DNS rule") && said("endpoint 1:"),
        "{:?}",
        status.warnings
    );
    let mut problems = status.problems.iter();
    assert!(!problems.any(|problem| problem.contains("without any DNS rule")));
}

#[tokio::test]
async fn cleaning_a_name_removes_its_address() {
    let lab = Lab::start();
    let client = serve(&lab);
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let endpoint = lab.endpoint().await;
    let mut stream = lab.mappings().await;
    stream
        .send(vec![
            mapping(endpoint, 1, "www.example.com.", [192, 0, 2, 1]),
            mapping(endpoint, 2, "api.example.com.", [192, 0, 2, 2]),
        ])
        .await;
    assert!(stream.result(2).await.realised);
    let path = format!("/v1/names?pattern={}", encode("www.*.com"));
    let _done: Done = client.delete(&path).await.unwrap();
    assert_eq!(stream.give_back().await, "www.example.com.");
    let gone = async {
        loop {
            let names: Vec<NameView> = client.get("/v1/names").await.unwrap();
            let prefixes: Vec<IpcacheView> = client.get("/v1/ipcache").await.unwrap();
            let cleaned = prefixes.iter().all(|p| p.prefix != "192.0.2.1/32");
            if cleaned && names.iter().any(|name| name.name == "api.example.com.") {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::lab::TEST_TIMEOUT, gone)
        .await
        .unwrap();
}

#[tokio::test]
async fn impossible_requests_are_refused_with_the_remedy() {
    let lab = Lab::start();
    let client = serve(&lab);
    let document = EndpointDocument {
        netns: Some("hf-none-such".to_owned()),
        ifname: "eth0".to_owned(),
        labels: vec!["k8s:app=web".to_owned()],
        ..EndpointDocument::default()
    };
    let error = client
        .post::<EndpointView>("/v1/endpoints", &document)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("hf-none-such does not exist"),
        "{error}"
    );
    let error = client
        .delete::<Done>("/v1/endpoints?endpoint=77")
        .await
        .unwrap_err();
    assert!(error.to_string().contains("no endpoint 77"), "{error}");
    let error = client.get::<Status>("/v1/nothing").await.unwrap_err();
    assert!(matches!(error, ClientError::Refused(_)), "{error}");
    let nobody = Client::new(&lab.dir.path().join("run/none.sock"));
    let error = nobody.get::<Status>("/v1/status").await.unwrap_err();
    assert!(error.to_string().contains("--admin-socket"), "{error}");
}
