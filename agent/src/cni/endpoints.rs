//! Pods of the CNI plugin as endpoints, whose policy is in programs.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use super::enforcement::{Enforcement, PodStanding};
use crate::{
    endpoint::source::{
        EndpointBook, EndpointError,
        cni::{AttachError, Attachment, AttachmentId},
    },
    runner::{CoreAway, CoreHandle},
};

/// The endpoints of an agent.
#[derive(Clone)]
pub(crate) struct Endpoints {
    pub(crate) core: CoreHandle,
    pub(crate) book: Arc<EndpointBook>,
}

impl Enforcement for Endpoints {
    fn attach(&self, attachment: Attachment) -> Result<(), AttachError> {
        self.book.attach(attachment).map(drop)
    }

    fn key_of(&self, id: &AttachmentId, netns: Option<&Path>) -> String {
        self.book.key_of(id, netns)
    }

    async fn standing(&self, key: &str) -> Result<PodStanding, CoreAway> {
        let key = key.to_owned();
        let standing = self.core.inspect(move |core| core.standing(&key)).await?;
        Ok(standing.into())
    }

    fn detach(&self, id: &AttachmentId) -> Result<usize, EndpointError> {
        self.book.detach(id).map(usize::from)
    }

    fn end(&self, id: &AttachmentId, netns: &Path) -> Result<usize, EndpointError> {
        self.book.end(id, netns).map(usize::from)
    }

    fn detach_others(&self, valid: &BTreeSet<AttachmentId>) -> Result<usize, EndpointError> {
        self.book.detach_others(valid)
    }

    async fn settle(&self) -> Result<(), CoreAway> {
        self.core.inspect(|_| ()).await
    }
}
