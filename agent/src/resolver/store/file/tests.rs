//! Objects in a directory.

use std::net::IpAddr;

use polling::until_async;

use super::*;
use crate::resolver::{
    object::{AddressStatus, NameStatus, UnixTime},
    observe::observe,
    vectors,
};

const NAMESPACE: &str = "dns";

struct Lab {
    dir: tempfile::TempDir,
    store: FileStore,
    stop: CancellationToken,
    role: watch::Receiver<Role>,
    health: watch::Receiver<StoreHealth>,
    changes: mpsc::Receiver<Changes>,
}

impl Lab {
    fn start(dir: tempfile::TempDir) -> Self {
        let store = FileStore::new(dir.path(), NAMESPACE);
        let stop = CancellationToken::new();
        let (role_out, role) = watch::channel(Role::default());
        let (health_out, health) = watch::channel(StoreHealth::default());
        let (changes_out, changes) = mpsc::channel(64);
        let tasks = tokio_util::task::TaskTracker::new();
        let (watched, ended) = (store.clone(), stop.clone());
        tasks.spawn(async move { watched.watch(changes_out, health_out, ended).await });
        let (led, ended) = (store.clone(), stop.clone());
        tasks.spawn(async move { led.lead(role_out, ended).await });
        Self {
            dir,
            store,
            stop,
            role,
            health,
            changes,
        }
    }

    async fn leads(&mut self) {
        self.role
            .wait_for(|role| *role == Role::Leads)
            .await
            .unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(DIRECTORY).join(name)
    }

    async fn next(&mut self) -> Changes {
        self.changes.recv().await.unwrap()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap_or_default()
    }

    async fn problem(&mut self, says: &str) -> String {
        let found = self
            .health
            .wait_for(|health| health.problems.iter().any(|p| p.contains(says)));
        found.await.unwrap().problems.join("\n")
    }
}

fn key(name: &str) -> ObjectKey {
    ObjectKey {
        namespace: NAMESPACE.to_owned(),
        name: name.to_owned(),
    }
}

fn status(name: &Fqdn, last: u8) -> Status {
    let address = AddressStatus {
        ip: IpAddr::from([192, 0, 2, last]),
        ttl: 30,
        last: UnixTime(1_764_000_000),
    };
    let entry = NameStatus {
        name: name.clone(),
        addresses: vec![address],
        failures: 0,
        degraded: None,
    };
    Status { names: vec![entry] }
}

fn is_init(changes: &Changes) -> bool {
    changes.first() == Some(&SourceEvent::Init)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_is_written_only_over_the_version_that_was_read_and_is_found_after_a_restart() {
    let mut lab = Lab::start(tempfile::tempdir().unwrap());
    assert!(is_init(&lab.next().await));
    lab.leads().await;
    let name = Fqdn::normalise("www.example.com");
    let Created::Done(object) = lab.store.create(&key("a"), &name).await.unwrap() else {
        panic!("not made");
    };
    assert_eq!(lab.next().await, [SourceEvent::Apply(object.clone())]);
    assert_eq!(
        lab.store.create(&key("a"), &name).await.unwrap(),
        Created::Exists
    );
    let update = |version: Version, last| {
        let (store, name) = (lab.store.clone(), name.clone());
        async move {
            store
                .update_status(&key("a"), &version, &status(&name, last))
                .await
                .unwrap()
        }
    };
    let Updated::Done(second) = update(object.version.clone(), 1).await else {
        panic!("not written");
    };
    assert_eq!(update(object.version, 2).await, Updated::Conflict);
    let gone = lab
        .store
        .update_status(&key("b"), &second, &Status::default())
        .await
        .unwrap();
    assert_eq!(gone, Updated::Gone);
    let mode = fs::metadata(lab.file("a.yaml"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    lab.stop.cancel();
    let lab = Lab::start(lab.dir);
    let found = lab.store.get(&key("a")).await.unwrap().unwrap();
    assert_eq!((found.version, found.status), (second, status(&name, 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_agents_on_a_directory_writes_and_the_other_takes_over() {
    let mut first = Lab::start(tempfile::tempdir().unwrap());
    first.leads().await;
    let other = tempfile::tempdir().unwrap();
    fs::remove_dir(other.path()).unwrap();
    std::os::unix::fs::symlink(first.dir.path(), other.path()).unwrap();
    let mut second = Lab::start(other);
    assert!(is_init(&second.next().await));
    let name = Fqdn::normalise("www.example.com");
    first.store.create(&key("a"), &name).await.unwrap();
    let [SourceEvent::Apply(object)] = &*second.next().await else {
        panic!("the other agent does not see the object");
    };
    let refused = second
        .store
        .update_status(&key("a"), &object.version, &status(&name, 1))
        .await;
    assert!(
        matches!(refused, Err(StoreError::Refused(_))),
        "{refused:?}"
    );
    assert_eq!(*second.role.borrow(), Role::Follows);
    assert!(second.health.borrow().problems.is_empty());
    first.stop.cancel();
    second.leads().await;
    let written = second
        .store
        .update_status(&key("a"), &object.version, &status(&name, 1))
        .await;
    assert!(matches!(written, Ok(Updated::Done(_))), "{written:?}");
    // Removes the link, not the directory that it leads to.
    fs::remove_file(second.dir.path()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_by_hand_is_overwritten_by_the_next_write_and_a_removed_file_is_written_again() {
    let mut lab = Lab::start(tempfile::tempdir().unwrap());
    lab.leads().await;
    let name = Fqdn::normalise("www.example.com");
    let Created::Done(mut object) = lab.store.create(&key("a"), &name).await.unwrap() else {
        panic!("not made");
    };
    let made = lab.read("a.yaml");
    for bad in [
        made.replace("www.example.com.", "www.example.org."),
        String::new(),
        "{".to_owned(),
    ] {
        fs::write(lab.file("a.yaml"), bad).unwrap();
        let there = lab.store.list().await.unwrap();
        assert_eq!(there.as_slice(), std::slice::from_ref(&object));
        let updated = lab
            .store
            .update_status(&key("a"), &object.version, &status(&name, 1))
            .await;
        let Ok(Updated::Done(version)) = updated else {
            panic!("{updated:?}");
        };
        (object.version, object.status) = (version, status(&name, 1));
        let fresh = FileStore::new(lab.dir.path(), NAMESPACE);
        assert_eq!(
            fresh.list().await.unwrap().as_slice(),
            std::slice::from_ref(&object)
        );
    }
    let good = lab.read("a.yaml");
    fs::remove_file(lab.file("a.yaml")).unwrap();
    until_async(
        "the file is written again",
        || lab.read("a.yaml"),
        |text| *text == good,
    )
    .await;
    lab.store.delete(&key("a")).await.unwrap();
    assert!(!lab.file("a.yaml").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_torn_file_of_a_known_object_is_set_aside_and_written_again() {
    let mut lab = Lab::start(tempfile::tempdir().unwrap());
    lab.leads().await;
    let name = Fqdn::normalise("www.example.com");
    lab.store.create(&key("a"), &name).await.unwrap();
    let good = lab.read("a.yaml");
    fs::write(lab.file("a.yaml"), &good[..good.len() / 2]).unwrap();
    lab.problem("a.yaml.corrupt").await;
    until_async(
        "the object is written again",
        || lab.read("a.yaml"),
        |text| *text == good,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_not_an_object_is_set_aside_and_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(DIRECTORY)).unwrap();
    let lab_file = |name: &str| dir.path().join(DIRECTORY).join(name);
    let of = |version: &str, name: &str| {
        format!(
            r"
apiVersion: network.openshift.io/{version}
kind: DNSNameResolver
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec: {{name: www.example.com.}}
"
        )
    };
    fs::write(lab_file("newer.yaml"), of("v9", "newer")).unwrap();
    fs::write(lab_file("torn.yaml"), "apiVersion: netw").unwrap();
    fs::write(lab_file("other.yaml"), of("v1alpha1", "name")).unwrap();
    fs::write(lab_file("large.yaml"), vec![b'#'; 3 << 20]).unwrap();
    fs::write(lab_file("good.yaml"), of("v1alpha1", "good")).unwrap();
    let mut lab = Lab::start(dir);
    lab.leads().await;
    lab.problem("newer.yaml.corrupt").await;
    for (file, says) in [
        (
            "newer",
            "only DNSNameResolver of network.openshift.io/v1alpha1 is read",
        ),
        ("torn", "torn.yaml: "),
        ("other", "is the object dns/name"),
        ("large", "has 3145728 bytes"),
    ] {
        let problems = lab.problem(&format!("{file}.yaml.corrupt")).await;
        assert!(problems.contains(says), "{problems}");
        assert!(!lab.file(&format!("{file}.yaml")).exists());
        fs::remove_file(lab.file(&format!("{file}.yaml.corrupt"))).unwrap();
    }
    let healthy = lab.health.wait_for(|health| health.problems.is_empty());
    healthy.await.unwrap();
    let objects = lab.store.list().await.unwrap();
    assert_eq!(
        objects
            .iter()
            .map(|o| o.key.name.as_str())
            .collect::<Vec<_>>(),
        ["good"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_can_be_neither_read_nor_set_aside_does_not_hide_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join(DIRECTORY);
    fs::create_dir(&objects).unwrap();
    let good = format!(
        r"
apiVersion: network.openshift.io/v1alpha1
kind: DNSNameResolver
metadata: {{name: good, namespace: {NAMESPACE}}}
spec: {{name: www.example.com.}}
"
    );
    fs::write(objects.join("good.yaml"), good).unwrap();
    std::os::unix::fs::symlink("circle.yaml", objects.join("circle.yaml")).unwrap();
    fs::write(objects.join("a.yaml"), "apiVersion: netw").unwrap();
    fs::create_dir_all(objects.join("a.yaml.corrupt/full")).unwrap();
    let mut lab = Lab::start(dir);
    lab.leads().await;
    let problems = lab.problem("circle.yaml").await;
    assert!(problems.contains("a.yaml"), "{problems}");
    let listed = lab.store.list().await.unwrap();
    assert_eq!(listed.len(), 1, "{problems}");
    let changes = lab.next().await;
    assert!(is_init(&changes) && changes.len() == 3, "{changes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_into_which_every_user_may_write_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let objects = dir.path().join(DIRECTORY);
    fs::create_dir(&objects).unwrap();
    fs::set_permissions(&objects, Permissions::from_mode(0o777)).unwrap();
    let above = dir.path().to_owned();
    let set = |path: &Path, mode: u32| {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    };
    let mut lab = Lab::start(dir);
    lab.problem("every user may write into it: forbid that (chmod o-w)")
        .await;
    assert_ne!(*lab.role.borrow(), Role::Leads);
    set(&objects, 0o770);
    lab.problem("its group may write into it: forbid that (chmod g-w)")
        .await;
    assert_ne!(*lab.role.borrow(), Role::Leads);
    set(&objects, 0o700);
    set(&above, 0o777);
    lab.problem("of the directory above: every user may write into it")
        .await;
    assert_ne!(*lab.role.borrow(), Role::Leads);
    set(&above, 0o700);
    lab.leads().await;
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&objects, dir.path().join(DIRECTORY)).unwrap();
    let mut linked = Lab::start(dir);
    linked.problem("it is not a directory").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_set_aside_is_a_problem_until_it_is_removed_or_moved_back() {
    let mut lab = Lab::start(tempfile::tempdir().unwrap());
    lab.leads().await;
    let object = vectors::object(NAMESPACE, "a", "www.example.com.", Vec::new());
    let damage = async |lab: &mut Lab| {
        fs::write(lab.file("a.yaml"), "{").unwrap();
        lab.problem("a.yaml.corrupt").await;
    };
    let ends = async |lab: &mut Lab| {
        let healthy = lab.health.wait_for(|health| health.problems.is_empty());
        healthy.await.unwrap();
    };
    damage(&mut lab).await;
    fs::remove_file(lab.file("a.yaml.corrupt")).unwrap();
    ends(&mut lab).await;
    // The next run names the file too.
    damage(&mut lab).await;
    lab.stop.cancel();
    lab.store.files.lock().set_leads(false);
    let dir = std::mem::replace(&mut lab.dir, tempfile::tempdir().unwrap());
    drop(lab);
    let mut lab = Lab::start(dir);
    lab.problem("a.yaml.corrupt").await;
    let text = serde_yaml_ng::to_string(&object.document()).unwrap();
    fs::write(lab.file("a.yaml.corrupt"), text).unwrap();
    fs::rename(lab.file("a.yaml.corrupt"), lab.file("a.yaml")).unwrap();
    ends(&mut lab).await;
    assert_eq!(lab.store.list().await.unwrap().len(), 1);
}

#[test]
fn a_damaged_file_is_no_problem_of_an_agent_that_follows_once_it_is_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let object = vectors::object(NAMESPACE, "a", "www.example.com.", Vec::new());
    put(dir.path(), &object);
    let store = FileStore::new(dir.path(), NAMESPACE);
    let mut files = store.files.lock();
    files.scan().unwrap();
    fs::write(dir.path().join(DIRECTORY).join("a.yaml"), "{").unwrap();
    files.scan().unwrap();
    assert_eq!(files.problems(&Ok(())).len(), 1);
    put(dir.path(), &object);
    files.scan().unwrap();
    assert_eq!(files.problems(&Ok(())), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_cannot_write_leads_in_memory_and_says_so_until_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let blocked = dir.path().join(DIRECTORY);
    fs::write(&blocked, "").unwrap();
    let mut lab = Lab::start(dir);
    let in_memory = lab.role.wait_for(|role| *role == Role::LeadsInMemory);
    in_memory.await.unwrap();
    let expected = [SourceEvent::Init, SourceEvent::InitDone];
    assert_eq!(lab.next().await, expected, "nothing is known");
    let problems = lab.problem("kept in memory only").await;
    assert_eq!(lab.health.borrow().problems.len(), 1, "{problems}");
    for says in [blocked.to_str().unwrap(), "--resolver-dir"] {
        assert!(problems.contains(says), "{problems}");
    }
    let name = Fqdn::normalise("www.example.com");
    assert!(lab.store.create(&key("a"), &name).await.is_err());
    fs::remove_file(&blocked).unwrap();
    lab.leads().await;
    let healthy = lab.health.wait_for(|health| health.problems.is_empty());
    healthy.await.unwrap();
    lab.store.create(&key("a"), &name).await.unwrap();
    assert!(lab.file("a.yaml").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_file_that_is_gone_is_made_again_without_an_end_of_the_lead() {
    let mut lab = Lab::start(tempfile::tempdir().unwrap());
    lab.leads().await;
    lab.role.mark_unchanged();
    let lock = lab.file(LOCK);
    fs::remove_file(&lock).unwrap();
    until_async("the lock file", || lock.exists(), |exists| *exists).await;
    // Longer than a turn of the agent.
    sleep(2 * ATTEMPTS).await;
    assert!(!lab.role.has_changed().unwrap());
    assert_eq!(*lab.role.borrow(), Role::Leads);
}

/// Puts the object of a case into a directory, before an agent runs there.
fn put(dir: &Path, object: &Resolver) {
    let dir = dir.join(DIRECTORY);
    fs::create_dir_all(&dir).unwrap();
    let text = serde_yaml_ng::to_string(&object.document()).unwrap();
    fs::write(dir.join(format!("{}.yaml", object.key.name)), text).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn look_ups_change_files_as_they_change_objects_of_openshift() {
    let mut count = 0;
    for case in vectors::cases() {
        if case["group"] != "plugin_lookup_to_status" {
            continue;
        }
        count += 1;
        let id = case["id"].as_str().unwrap();
        let settings = vectors::settings(&case["params"]);
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        // A directory has one namespace.
        let mut stores = Vec::new();
        for given in case["given"].as_array().unwrap() {
            let entries = given["status_before"].as_array().unwrap().clone();
            let (namespace, spec) = (text(&given["namespace"]), text(&given["spec_name"]));
            let object = vectors::object(&namespace, &text(&given["name"]), &spec, entries);
            let dir = tempfile::tempdir().unwrap();
            put(dir.path(), &object);
            let store = FileStore::new(dir.path(), &namespace);
            store.list().await.unwrap();
            store.files.lock().set_leads(true);
            stores.push((dir, store, object.key));
        }
        for lookup in case["lookups"].as_array().unwrap() {
            if lookup["qtype"] != "A" && lookup["qtype"] != "AAAA" {
                continue;
            }
            for (_, store, key) in &stores {
                let object = store.get(key).await.unwrap().unwrap();
                let name = Fqdn::normalise(lookup["qname"].as_str().unwrap());
                let outcome = vectors::outcome(lookup);
                let change = observe(
                    &object.status,
                    &object.name,
                    &name,
                    &outcome,
                    vectors::NOW,
                    &settings,
                );
                if let Some(status) = change.status {
                    let updated = store
                        .update_status(key, &object.version, &status)
                        .await
                        .unwrap();
                    assert!(matches!(updated, Updated::Done(_)), "{id}: {updated:?}");
                }
            }
        }
        for expected in case["expect"].as_array().unwrap() {
            let mut stores = stores.iter();
            let store = stores.find(|(_, _, key)| expected["object"] == key.to_string());
            let (dir, _, key) = store.unwrap();
            // Reads the object as another agent does.
            let fresh = FileStore::new(dir.path(), &key.namespace);
            let object = fresh.get(key).await.unwrap().unwrap();
            assert_eq!(
                vectors::shown(&object.status),
                expected["resolvedNames"],
                "{id}"
            );
        }
    }
    assert_eq!(count, 26);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_never_gets_another_name_by_a_file() {
    let dir = tempfile::tempdir().unwrap();
    put(
        dir.path(),
        &vectors::object(NAMESPACE, "a", "www.example.com.", Vec::new()),
    );
    let store = FileStore::new(dir.path(), NAMESPACE);
    store.list().await.unwrap();
    // An agent that follows keeps the object; the next write of the agent that leads replaces the file.
    put(
        dir.path(),
        &vectors::object(NAMESPACE, "a", "www.example.org.", Vec::new()),
    );
    let kept = store.get(&key("a")).await.unwrap().unwrap();
    assert_eq!(kept.name, Fqdn::normalise("www.example.com"));
    let problems = store.files.lock().problems(&Ok(()));
    assert!(
        problems[0].contains("spec.name is immutable"),
        "{problems:?}"
    );
}
