//! State after a restart, with complete and damaged files.

use std::fs;

use agent_datapath::files::StateFiles;
use holdfast_agent::restore::{self, Found, RestoreError};
use shared_maps::{EndpointId, user::ipcache_key};

use crate::lab::{Lab, mapping, pod, policy};

#[tokio::test]
async fn numbers_and_learned_addresses_survive() {
    let lab = Lab::start_synced().await;
    let before = lab.core.snapshot().await.unwrap().endpoints.remove(0);
    let mut stream = lab.mappings().await;
    let address = [192, 0, 2, 7];
    stream
        .send(vec![mapping(
            before.id.into(),
            1,
            "www.example.com.",
            address,
        )])
        .await;
    assert!(stream.result(1).await.realised);
    // The second result says that the mapping is on disk.
    assert!(stream.result(1).await.durable);
    let key = ipcache_key(address.into(), 32);
    let identity = lab.datapath.memory.lock().ipcache[&key].sec_identity;
    let (dir, memory) = lab.stop().await;

    let lab = Lab::start_in(dir, memory);
    assert_eq!(lab.epoch.start, 2);
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let after = lab.core.snapshot().await.unwrap();
    assert_eq!(after.endpoints[0].id, before.id);
    assert_eq!(after.endpoints[0].identity, before.identity);
    assert!(after.names.iter().any(|name| name.address == "192.0.2.7"));
    assert_eq!(
        lab.datapath.memory.lock().ipcache[&key].sec_identity,
        identity
    );
}

#[tokio::test]
async fn damaged_files_are_set_aside_and_the_start_continues() {
    let lab = Lab::start_synced().await;
    let endpoint = lab.endpoint().await;
    let (dir, memory) = lab.stop().await;
    let state = dir.path().join("state");
    let checkpoint = state.join("local_allocator_state.json");
    let config = state.join(endpoint.to_string()).join("ep_config.json");
    for path in [&checkpoint, &config] {
        assert!(path.exists(), "{}", path.display());
        fs::write(path, b"{\"half\":\xff").unwrap();
    }

    let files = StateFiles::open(&state).unwrap();
    let mut found = Found::default();
    restore::read_files(&files, &mut found).unwrap();
    assert_eq!(found.damaged.len(), 2);
    for path in [&checkpoint, &config] {
        let aside = format!("{}.corrupt", path.display());
        assert!(fs::exists(&aside).unwrap(), "{aside}");
        assert!(
            found.damaged.iter().any(|text| text.contains(&aside)),
            "{:?}",
            found.damaged
        );
    }

    let lab = Lab::start_in(dir, memory);
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let snapshot = lab.core.snapshot().await.unwrap();
    assert_eq!(snapshot.endpoints.len(), 1);
    let anew = snapshot.endpoints[0].id;
    let config = state.join(anew.to_string()).join("ep_config.json");
    assert!(config.exists(), "written again");
    // The endpoint gets a new number, and the old number's data is removed.
    assert_ne!(u32::from(anew), endpoint);
    let memory = lab.datapath.memory.lock();
    assert!(memory.policy.keys().eq([&EndpointId(anew)]));
    assert!(memory.attached.keys().eq([&EndpointId(anew)]));
}

#[test]
fn a_file_of_a_later_release_stops_the_start_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let files = StateFiles::open(dir.path()).unwrap();
    fs::write(
        files.endpoint_checkpoint(),
        r#"{"version":9,"identities":[]}"#,
    )
    .unwrap();
    let error = restore::read_files(&files, &mut Found::default()).unwrap_err();
    assert!(matches!(error, RestoreError::Newer { .. }), "{error}");
    assert!(
        error.to_string().contains("endpoint_identities.json"),
        "{error}"
    );
    assert!(files.endpoint_checkpoint().exists(), "left alone");
}
