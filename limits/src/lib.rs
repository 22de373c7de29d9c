//! What keeps one pod, one peer or one document from using up a program: shares of a limit, and YAML
//! documents of limited size.
#![warn(missing_docs)]

pub mod quota;
pub mod yaml;
