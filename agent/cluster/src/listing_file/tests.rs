//! The stored list: written, read, and refused.

use std::{os::unix::fs::PermissionsExt as _, sync::Arc, time::Duration};

use super::*;

fn origin() -> Origin {
    Origin {
        server: "https://192.0.2.1:6443".to_owned(),
        cluster: "default".to_owned(),
        authorities: vec!["0a".to_owned()],
    }
}

fn changed(changes: &[(&str, Option<&str>)]) -> Changed {
    let changes = changes.iter();
    changes
        .map(|(key, json)| ((*key).to_owned(), json.map(|json| json.to_owned().into())))
        .collect()
}

const POD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","namespace":"shop","uid":"u-1"},"status":{"podIP":"10.2.0.9"}}"#;
const NAMESPACE: &str = r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop"}}"#;
const ODD: &str = r#"{"apiVersion":"cilium.io/v2","kind":"CiliumNetworkPolicy","metadata":{"name":"odd","namespace":"shop"},"spec":null}"#;

fn keys(stored: &Stored) -> Vec<&str> {
    stored
        .documents
        .iter()
        .map(|(key, _)| key.as_str())
        .collect()
}

/// A listing of a namespace and a pod, on disk.
fn saved() -> (tempfile::TempDir, PathBuf, ListingFile) {
    let dir = tempfile::tempdir().unwrap();
    let path = ListingFile::path(dir.path());
    let mut file = ListingFile::new(dir.path(), origin());
    let objects = [
        ("Namespace/shop", Some(NAMESPACE)),
        ("Pod/shop/web", Some(POD)),
    ];
    file.save(&changed(&objects)).unwrap();
    (dir, path, file)
}

#[test]
fn a_listing_is_read_as_it_was_with_later_changes_and_with_refused_objects() {
    let dir = tempfile::tempdir().unwrap();
    let path = ListingFile::path(dir.path());
    let now = wall_time::of_file();
    assert!(read(&path, &origin(), None, now).unwrap().is_none());
    let mut file = ListingFile::new(dir.path(), origin());
    file.spill(&changed(&[
        ("Pod/shop/web", Some(POD)),
        ("Pod/shop/gone", Some(POD)),
    ]))
    .unwrap();
    // A listing that is not complete is not read.
    assert!(read(&path, &origin(), None, now).unwrap().is_none());
    let odd = "CiliumNetworkPolicy/shop/odd";
    file.spill(&changed(&[(odd, Some(ODD)), ("Pod/shop/gone", None)]))
        .unwrap();
    file.save(&changed(&[("Namespace/shop", Some(NAMESPACE))]))
        .unwrap();
    let stored = read(&path, &origin(), None, now).unwrap().unwrap();
    assert_eq!(keys(&stored), [odd, "Namespace/shop", "Pod/shop/web"]);
    assert!(stored.documents[0].1.is_err());
    assert!(stored.documents[2].1.is_ok());
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    file.save(&changed(&[("Pod/shop/web", None)])).unwrap();
    let stored = read(&path, &origin(), None, now).unwrap().unwrap();
    assert_eq!(keys(&stored), [odd, "Namespace/shop"]);
    // The file is JSON as a whole.
    let text = fs::read_to_string(&path).unwrap();
    let whole: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(whole["count"], 2);
}

#[test]
fn a_file_that_is_torn_damaged_newer_foreign_or_old_is_refused_by_name() {
    let (_dir, path, _file) = saved();
    let good = fs::read_to_string(&path).unwrap();
    let refusal = |text: &str| {
        fs::write(&path, text).unwrap();
        read(&path, &origin(), None, wall_time::of_file())
            .unwrap_err()
            .to_string()
    };
    for end in 0..good.len() {
        let Some(torn) = good.get(..end) else {
            continue;
        };
        // A file without its last line break is whole.
        if torn != good.trim_end() {
            assert!(refusal(torn).contains("cluster.json is damaged"), "{torn}");
        }
    }
    let damaged = refusal(&good.replace("10.2.0.9", "10.2.0.8"));
    assert!(damaged.contains("its sum differs"), "{damaged}");
    let newer = refusal(&good.replace("\"version\":1", "\"version\":2"));
    assert!(newer.contains("cluster.json has version 2"), "{newer}");
    let other = refusal(&good.replace("192.0.2.1", "192.0.2.2"));
    assert!(
        other.contains("its API server is https://192.0.2.2:6443, not"),
        "{other}"
    );
    let other = refusal(&good.replace("\"cluster\":\"default\"", "\"cluster\":\"blue\""));
    assert!(
        other.contains("its cluster name is blue, not default"),
        "{other}"
    );
    fs::write(&path, [0xff, 0xfe, b'\n']).unwrap();
    assert!(read(&path, &origin(), None, wall_time::of_file()).is_err());
    fs::write(&path, &good).unwrap();
    let day = Duration::from_secs(25 * 3600);
    let old = read(&path, &origin(), None, wall_time::of_file() + day).unwrap_err();
    assert!(old.to_string().contains("25 hours ago"), "{old}");
}

#[test]
fn a_listing_without_changes_is_confirmed_without_being_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = ListingFile::path(dir.path());
    let mut file = ListingFile::new(dir.path(), origin());
    file.save(&changed(&[("Namespace/shop", Some(NAMESPACE))]))
        .unwrap();
    let before = wall_time::of_file() - Duration::from_secs(7200);
    let handle = fs::File::options().append(true).open(&path).unwrap();
    handle.set_modified(before).unwrap();
    file.confirm().unwrap();
    let stored = read(&path, &origin(), None, wall_time::of_file())
        .unwrap()
        .unwrap();
    assert!(stored.age < Duration::from_secs(60), "{:?}", stored.age);
}

#[test]
fn damage_while_the_agent_runs_does_not_become_a_listing_with_gaps() {
    let (_dir, path, mut file) = saved();
    let good = fs::read_to_string(&path).unwrap();
    let odd = ("CiliumNetworkPolicy/shop/odd", Some(ODD));
    let lines = good.match_indices('\n').map(|(end, _)| &good[..=end]);
    let torn = lines.filter(|torn| *torn != good).map(str::to_owned);
    let changed_value = good.replace("10.2.0.9", "10.2.0.8");
    for damaged in torn.chain([changed_value, String::new()]) {
        fs::write(&path, &damaged).unwrap();
        let error = file.save(&changed(&[odd])).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{damaged}");
        let read = read(&path, &origin(), None, wall_time::of_file());
        assert!(read.is_err(), "{damaged}");
    }
    fs::remove_file(&path).unwrap();
    let error = file.save(&changed(&[odd])).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(!path.exists());
}

/// A listing of one namespace, kube-system with this uid.
fn of_cluster(dir: &Path, authorities: &[&str], uid: &str) -> Origin {
    let origin = Origin {
        authorities: authorities.iter().map(|one| (*one).to_owned()).collect(),
        ..origin()
    };
    let json = format!(
        r#"{{"apiVersion":"v1","kind":"Namespace","metadata":{{"name":"kube-system","uid":"{uid}"}}}}"#
    );
    let mut file = ListingFile::new(dir, origin.clone());
    file.save(&changed(&[("Namespace/kube-system", Some(&json))]))
        .unwrap();
    origin
}

#[test]
fn the_list_of_another_cluster_at_the_same_address_is_refused_by_its_uid_or_its_ca() {
    let dir = tempfile::tempdir().unwrap();
    let path = ListingFile::path(dir.path());
    let now = wall_time::of_file();
    let green = of_cluster(dir.path(), &["0a"], "green");
    let blue = Origin {
        authorities: vec!["0b".to_owned()],
        ..green.clone()
    };
    let uid = |uid: &str| Some(Arc::<str>::from(uid));
    let refused = |origin: &Origin, uid: Option<Arc<str>>| {
        let read = read(&path, origin, uid.as_ref(), now);
        read.err().map(|error| error.to_string())
    };
    assert_eq!(refused(&green, None), None);
    assert_eq!(refused(&green, uid("green")), None);
    // Only the uid counts: the cluster may have a new CA.
    assert_eq!(refused(&blue, uid("green")), None);
    let by_uid = refused(&green, uid("blue")).unwrap();
    let says = "its uid of namespace kube-system is green, not blue; remove it, or correct";
    assert!(
        by_uid.contains("cluster.json is of another cluster"),
        "{by_uid}"
    );
    assert!(by_uid.contains(says), "{by_uid}");
    let by_ca = refused(&blue, None).unwrap();
    assert!(
        by_ca.contains("its CA (fingerprint) is 0a, not 0b"),
        "{by_ca}"
    );

    // One CA replaces the other; without a CA in the settings, none is compared.
    let both = Origin {
        authorities: vec!["0b".to_owned(), "0a".to_owned()],
        ..green.clone()
    };
    let none = Origin {
        authorities: Vec::new(),
        ..green.clone()
    };
    assert_eq!(refused(&both, None), None);
    assert_eq!(refused(&none, None), None);

    // A file that was written without a CA.
    let text = fs::read_to_string(&path).unwrap();
    fs::write(
        &path,
        text.replace(r#""authorities":["0a"]"#, r#""authorities":[]"#),
    )
    .unwrap();
    assert_eq!(refused(&blue, None), None);
    assert!(refused(&blue, uid("blue")).is_some());

    // The first listing of the other cluster replaces it.
    let blue = of_cluster(dir.path(), &["0b"], "blue");
    assert_eq!(refused(&blue, uid("blue")), None);
    assert!(refused(&green, None).is_some());
}
