//! The `resolver` commands.

use anyhow::{Result, bail};
use daemon::command_line::table::{list, table};
use holdfast_agent::{
    admin::{client::Client, query::encode},
    config::args::ResolverCommand,
    resolver::{
        schedule::NoServers,
        view::{LookupView, NameView, ObjectView, ResolverView},
    },
};

use super::show::print;

pub(super) async fn run(command: ResolverCommand) -> Result<()> {
    match command {
        ResolverCommand::List(args) => {
            let objects: Vec<ObjectView> =
                Client::new(args.admin_socket()).get("/v1/resolver").await?;
            print(args.output(), &objects, |objects| overview(objects))
        }
        ResolverCommand::Get { name, client } => {
            let mut objects: Vec<ObjectView> = Client::new(client.admin_socket())
                .get("/v1/resolver")
                .await?;
            let wanted = dotted(&name);
            objects.retain(|object| {
                object.name == wanted
                    || object.key == name
                    || object.key.ends_with(&format!("/{name}"))
                    || object.names.iter().any(|entry| entry.name == wanted)
            });
            if objects.is_empty() {
                bail!("no DNSNameResolver is about {name}; `resolver list` shows all");
            }
            print(client.output(), &objects, |objects| details(objects))
        }
        ResolverCommand::Lookup { name, client } => {
            let path = format!("/v1/resolver/lookup?name={}", encode(&name));
            let found: LookupView = Client::new(client.admin_socket()).get(&path).await?;
            print(client.output(), &found, looked_up)?;
            match failure(&found) {
                None => Ok(()),
                Some(failure) => bail!("{failure}"),
            }
        }
    }
}

/// State of the resolver, for a line of `status`.
pub(super) fn state(view: &ResolverView) -> String {
    let next = match (view.role.as_str(), view.next_lookup_seconds) {
        ("leads", Some(seconds)) => format!(", next look-up in {seconds} s"),
        _ => String::new(),
    };
    let degraded = match view.degraded {
        0 => String::new(),
        count => format!(", {count} degraded"),
    };
    format!(
        "{}, {} objects with {} names and {} addresses{next}{degraded}",
        view.role, view.objects, view.names, view.addresses
    )
}

fn dotted(name: &str) -> String {
    let name = name.to_ascii_lowercase();
    match name.strip_suffix('.') {
        Some(_) => name,
        None => format!("{name}."),
    }
}

fn overview(objects: &[ObjectView]) -> String {
    table(
        objects,
        [
            ("NAME", |object| object.name.clone()),
            ("OBJECT", |object| object.key.clone()),
            ("NAMES", |object| object.names.len().to_string()),
            ("ADDRESSES", |object| {
                let names = object.names.iter();
                let addresses: usize = names.map(|name| name.addresses.len()).sum();
                addresses.to_string()
            }),
            ("DEGRADED", |object| {
                let names = object.names.iter();
                let degraded = names.filter(|name| name.degraded.is_some());
                degraded.count().to_string()
            }),
            ("NEXT LOOK-UP", |object| {
                let names = object.names.iter();
                in_seconds(names.filter_map(|name| name.next_lookup_seconds).min())
            }),
        ],
    )
}

fn in_seconds(seconds: Option<u64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds} s"))
}

fn details(objects: &[ObjectView]) -> String {
    let names = objects
        .iter()
        .flat_map(|object| object.names.iter().map(move |name| (object, name)));
    let names: Vec<(&ObjectView, &NameView)> = names.collect();
    if names.is_empty() {
        let keys: Vec<&str> = objects.iter().map(|object| object.key.as_str()).collect();
        return format!("{}: no name was looked up successfully yet\n", list(&keys));
    }
    table(
        &names,
        [
            ("NAME", |(_, name)| name.name.clone()),
            ("OBJECT", |(object, _)| object.key.clone()),
            ("STATE", |(_, name)| name_state(name)),
            ("NEXT LOOK-UP", |(_, name)| {
                in_seconds(name.next_lookup_seconds)
            }),
            ("FROM", |(_, name)| name.said_by.clone()),
            ("ADDRESSES", |(_, name)| addresses(name)),
        ],
    )
}

fn name_state(name: &NameView) -> String {
    match &name.degraded {
        Some(code) => format!("{code}, {} failures", name.failures),
        None => "good".to_owned(),
    }
}

fn addresses(name: &NameView) -> String {
    let addresses = name.addresses.iter();
    let shown: Vec<String> = addresses
        .map(|address| {
            let left = u64::from(address.ttl_seconds).saturating_sub(address.age_seconds);
            format!("{} ({left} s)", address.ip)
        })
        .collect();
    list(&shown)
}

/// Why the look-up gave no address; `None` if it gave one.
fn failure(found: &LookupView) -> Option<String> {
    let (name, servers) = (&found.name, list(&found.servers));
    Some(match found.outcome.as_str() {
        "found" => return None,
        "no_server" => format!("{name} was not looked up: {NoServers}"),
        "no_data" => format!("{name} exists and has no address: {servers} gave none"),
        "nxdomain" => format!("{name} does not exist: {servers} answered NXDOMAIN"),
        "timeout" => {
            format!("{name}: no answer of {servers}; check that this node reaches port 53 of them")
        }
        _ => format!("{name}: {servers} answered with an error; see the log of the DNS server"),
    })
}

fn looked_up(found: &LookupView) -> String {
    let addresses = found.addresses.iter();
    let addresses: Vec<String> = addresses
        .map(|address| format!("{} (TTL {} s)", address.ip, address.ttl_seconds))
        .collect();
    format!(
        "{}: {}\nservers    {}\naddresses  {}\nobjects    {}\n",
        found.name,
        found.outcome,
        list(&found.servers),
        list(&addresses),
        list(&found.objects)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_up_without_an_address_fails_with_a_sentence() {
        let of = |outcome: &str, servers: &[&str]| {
            failure(&LookupView {
                name: "www.example.org.".to_owned(),
                outcome: outcome.to_owned(),
                servers: servers.iter().map(ToString::to_string).collect(),
                ..LookupView::default()
            })
        };
        let server = ["192.0.2.53:53"];
        assert_eq!(of("found", &server), None);
        for (outcome, servers, says) in [
            (
                "nxdomain",
                &server[..],
                "does not exist: 192.0.2.53:53 answered NXDOMAIN",
            ),
            ("no_data", &server, "has no address"),
            ("timeout", &server, "no answer of 192.0.2.53:53"),
            ("error", &server, "192.0.2.53:53 answered with an error"),
            ("no_server", &[], "give --dns-server"),
        ] {
            let failure = of(outcome, servers).unwrap();
            assert!(failure.starts_with("www.example.org."), "{failure}");
            assert!(failure.contains(says), "{failure}");
        }
    }
}
