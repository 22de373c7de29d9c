//! Requests about the resolver.

use super::server::Admin;
use crate::{
    refusal::Refusal,
    resolver::{
        dns_name,
        task::{NotRunning, ResolverHandle},
        view::{LookupView, ObjectView, ResolverView},
    },
};

impl From<NotRunning> for Refusal {
    fn from(error: NotRunning) -> Self {
        Self::unavailable(error.to_string())
    }
}

impl Admin {
    fn running_resolver(&self) -> Result<&ResolverHandle, Refusal> {
        self.resolver.as_ref().ok_or_else(|| {
            Refusal::not_found(
                "the agent refreshes no names: start it with --resolver-dir DIR or --resolver kube",
            )
        })
    }

    /// State of the resolver; `None` without a resolver. If it does not answer, a text is added to `problems`.
    pub(super) async fn resolver_state(&self, problems: &mut Vec<String>) -> Option<ResolverView> {
        match self.resolver.as_ref()?.state().await {
            Ok(view) => {
                problems.extend(view.problems.iter().cloned());
                Some(view)
            }
            Err(error) => {
                problems.push(error.to_string());
                None
            }
        }
    }

    /// Lists the resolver's objects. Without a resolver the request fails with status 404.
    pub(super) async fn resolver_objects(&self) -> Result<Vec<ObjectView>, Refusal> {
        Ok(self.running_resolver()?.objects().await?)
    }

    /// Looks the name up at the trusted DNS servers now. The final dot is optional.
    pub(super) async fn resolver_lookup(&self, name: &str) -> Result<LookupView, Refusal> {
        let dotted = match name.strip_suffix('.') {
            Some(_) => name.to_owned(),
            None => format!("{name}."),
        };
        let name = dns_name::parse(&dotted)
            .map_err(|error| Refusal::bad_request(format!("{name:?} {error}")))?;
        Ok(self.running_resolver()?.look_up(&name).await?)
    }
}
