//! Access lists as JSON, and as commands for VPP's command line.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Acl, Interface, POD, Row, RowAction};
use crate::{
    field::{Checked, Field},
    pod::PodId,
    policy::Protocol,
    ports::Span,
};

/// The document `acl.json`.
pub fn to_json(acls: &[Acl]) -> Value {
    let names =
        |of: &BTreeSet<Interface>| -> Vec<String> { of.iter().map(Interface::to_string).collect() };
    let acls = acls.iter().map(|acl| {
        json!({
            "name": acl.name,
            "input": names(&acl.input),
            "output": names(&acl.output),
            "rules": acl.rows.iter().map(row_to_json).collect::<Vec<_>>(),
        })
    });
    json!({"acls": acls.collect::<Vec<_>>()})
}

fn row_to_json(row: &Row) -> Value {
    json!({
        "action": row.action.as_str(),
        "src": row.source.to_string(),
        "dst": row.destination.to_string(),
        "protocol": row.protocol.map_or(0, Protocol::number),
        "sport": range(row.source_ports),
        "dport": range(row.destination_ports),
    })
}

/// Reads `acl.json`.
pub fn from_json(document: &Value) -> Checked<Vec<Acl>> {
    let acls = Field::top(document).get("acls").items()?;
    acls.map(|acl| {
        let interfaces = |name: &str| {
            acl.get(name)
                .items()?
                .map(|field| interface(&field))
                .collect::<Checked<_>>()
        };
        let rows = acl.get("rules").items()?.map(|field| row_from_json(&field));
        Ok(Acl {
            name: acl.get("name").text()?.to_owned(),
            rows: rows.collect::<Checked<_>>()?,
            input: interfaces("input")?,
            output: interfaces("output")?,
        })
    })
    .collect()
}

fn interface(field: &Field<'_>) -> Checked<Interface> {
    let text = field.text()?;
    let Some(pod) = text.strip_prefix(POD) else {
        return Ok(Interface::Node(text.to_owned()));
    };
    let pod = PodId::parse(pod);
    pod.map(Interface::Pod).ok_or_else(|| {
        let reason = format!("`{text}` is not a pod");
        field.fault(reason, "write pod:namespace/name")
    })
}

fn row_from_json(field: &Field<'_>) -> Checked<Row> {
    let net = |name: &str| {
        let field = field.get(name);
        let net = field.text()?.parse();
        net.map_err(|_| field.fault("is not a prefix", "write for example 10.0.0.0/8"))
    };
    let ports = |name: &str| {
        let field = field.get(name);
        let ports = parse_range(field.text()?);
        ports.ok_or_else(|| field.fault("is not a range of ports", "write for example 80-81"))
    };
    let action = field.get("action");
    let mut actions = RowAction::ALL.into_iter();
    let named = actions.find(|known| action.as_str() == Some(known.as_str()));
    let remedy = "write deny, permit or permit+reflect";
    let protocol = field.get("protocol");
    let number = protocol.value.and_then(Value::as_u64);
    let mut protocols = Protocol::ALL.into_iter();
    let known = protocols.find(|known| number == Some(known.number().into()));
    if known.is_none() && number != Some(0) {
        return protocol.refuse("is not a protocol", "write 0, 6, 17 or 132");
    }
    Ok(Row {
        action: named.ok_or_else(|| action.fault("is not an action", remedy))?,
        source: net("src")?,
        destination: net("dst")?,
        protocol: known,
        source_ports: ports("sport")?,
        destination_ports: ports("dport")?,
    })
}

/// Commands that make the lists in a vswitch without other lists, and apply them. They name the
/// interface of a pod as `pod:namespace/name`.
pub fn cli(acls: &[Acl]) -> String {
    let lists = acls.iter().map(|acl| {
        let rows: Vec<String> = acl.rows.iter().map(Row::to_string).collect();
        format!("set acl-plugin acl {} tag {}\n", rows.join(", "), acl.name)
    });
    let applied = acls.iter().enumerate().flat_map(|(index, acl)| {
        let input = acl.input.iter().map(|interface| (interface, "input"));
        let output = acl.output.iter().map(|interface| (interface, "output"));
        input.chain(output).map(move |(interface, way)| {
            format!("set acl-plugin interface {interface} {way} acl {index}\n")
        })
    });
    lists.chain(applied).collect()
}

fn range(ports: Span) -> String {
    format!("{}-{}", ports.first(), ports.last())
}

fn parse_range(text: &str) -> Option<Span> {
    let (first, last) = text.split_once('-')?;
    Span::new(first.parse().ok()?, last.parse().ok()?)
}
