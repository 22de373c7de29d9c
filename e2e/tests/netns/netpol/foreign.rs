//! Other programs' edits of the table are repaired, and other tables are left alone.

use anyhow::ensure;
use holdfast_e2e::netpol_run::{NETPOL_METRICS, TABLE};
use holdfast_e2e::{eventually, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, both, of, reaches};

#[test]
fn each_edit_of_another_program_is_repaired() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": []}))?;
        let nft = |command: &str| lab.node.run("nft", &[command]).map(drop);
        nft("add table inet other; add chain inet other c; add rule inet other c drop")?;
        let _netpol = lab.start_netpol(&[])?;
        eventually("both interfaces are known", SOON, || {
            let table = lab.netpol_table()?;
            ensure!(table.contains(&lab.b.host_side), "{table}");
            Ok(())
        })?;
        let wanted = lab.netpol_table()?;
        let table = TABLE.join(" ");
        for (repairs, edit) in [
            format!("insert rule {table} forward accept"),
            format!("flush chain {table} forward"),
            format!("flush map {table} to4"),
            format!("add set {table} theirs {{ type ipv4_addr; }}"),
            format!("add table {table} {{ flags dormant; }}"),
            format!("delete table {table}"),
        ]
        .iter()
        .enumerate()
        {
            nft(edit)?;
            eventually(&format!("the repair of: {edit}"), SOON, || {
                let now = lab.netpol_table()?;
                ensure!(now == wanted, "{now}");
                let repaired = lab.metric(NETPOL_METRICS, "holdfast_netpol_repairs_total", "")?;
                ensure!(repaired > repairs as f64 + 0.5, "{repaired} repairs");
                Ok(())
            })?;
            reaches(&lab.a, &both(&lab.b, PORT), false)?;
        }
        let other = lab.node.run("nft", &["list table inet other"])?;
        ensure!(other.contains("drop"), "{other}");
        Ok::<_, anyhow::Error>(())
    });
}
