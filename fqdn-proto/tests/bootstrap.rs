//! The committed code equals the code that `proto/` generates.
//! `HOLDFAST_BLESS=1 cargo test -p fqdn-proto --test bootstrap` writes it again.

use std::{fs, path::Path};

const PROTOS: [&str; 3] = [
    "holdfast/fqdn/v1/fqdn.proto",
    "holdfast/relay/v1/relay.proto",
    "standalonednsproxy/fqdndata.proto",
];

#[test]
fn committed_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("a temporary directory");
    let descriptors =
        protox::compile(PROTOS, [root.join("proto")]).expect("the proto files compile");
    tonic_prost_build::configure()
        .out_dir(out.path())
        .compile_fds(descriptors)
        .expect("code generation");
    for name in [
        "holdfast.fqdn.v1.rs",
        "holdfast.relay.v1.rs",
        "standalonednsproxy.rs",
    ] {
        let fresh = fs::read_to_string(out.path().join(name)).expect("generated file");
        let committed = root.join("src/gen").join(name);
        #[expect(clippy::disallowed_methods, reason = "a switch of this test only")]
        let bless = std::env::var_os("HOLDFAST_BLESS").is_some();
        if bless {
            fs::write(&committed, &fresh).expect("write generated file");
        }
        let current = fs::read_to_string(&committed).unwrap_or_default();
        assert!(
            current == fresh,
            "{} is out of date: run HOLDFAST_BLESS=1 cargo test -p fqdn-proto --test bootstrap",
            committed.display()
        );
    }
}
