//! The names in documents, on disk: for the OCI hook, and for the next run of the agent, which may refuse a document
//! that this run accepted.

use super::{State, bridges, containers::StartError};
use crate::endpoint::container::{ContainerName, NamedContainers};

impl State {
    /// Stores what documents name, and closes the interfaces that they name.
    pub(super) fn record_names(&mut self) {
        let named = self.store_names();
        // Without a listing, the interfaces that the last run closed stay closed.
        if self.dir.is_none() || self.listing.listed {
            self.gated.close_names(named.interfaces());
        }
    }

    /// Stores what documents name. While some documents are not accepted, what documents named before stays. A file
    /// that was deleted, or could not be written, is written again.
    pub(super) fn store_names(&mut self) -> NamedContainers {
        // A port of a bridge is not stored, because the name of its interface may belong to another container later.
        let documents = self.documents.iter();
        let documents = documents.filter(|(key, _)| !bridges::is_key(key));
        let documents = documents.map(|(_, document)| document);
        let mut named = NamedContainers::of(
            documents
                .clone()
                .filter_map(|document| document.container.clone()),
            documents
                .clone()
                .filter_map(|document| document.bridge.clone()),
            documents.filter_map(|document| document.interface.clone()),
        );
        let listing = &mut self.listing;
        let is_listed = self.dir.is_none() || listing.listed;
        if is_listed && listing.torn.is_empty() && listing.refused.is_empty() {
            listing.unread = NamedContainers::default();
        }
        // If a document has one of these names again, the name is removed with that document.
        listing.unread.take_out(&named);
        named.add(&listing.unread);
        self.store.set_containers(&named);
        named
    }

    /// Refuses the start of a container that no document names now but a former document named. That document may be
    /// among the documents that are not accepted.
    pub(super) fn refuse_unread(
        &self,
        name: Option<&ContainerName>,
        pid: u32,
    ) -> Result<(), StartError> {
        let listing = &self.listing;
        let named = name.filter(|name| listing.unread.has(name));
        let what = match named {
            Some(name) => name.to_string(),
            None => match listing.unread.bridge_of(pid) {
                Ok(Some(bridge)) => format!("the bridge {bridge} of the container"),
                Ok(None) => return Ok(()),
                Err(error) => format!("a bridge that the container may be on ({error})"),
            },
        };
        let files: Vec<&str> = listing
            .refused
            .union(&listing.torn)
            .map(String::as_str)
            .collect();
        let files = files.join(", ");
        Err(StartError::Unread { what, files })
    }
}
