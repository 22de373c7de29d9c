//! What the command lines of both programs share: flags with their help, forms of output, tables, and
//! the words for an error.

pub mod endpoint_args;
pub mod failure;
pub mod file_args;
pub mod health;
pub mod log_args;
pub mod metrics_address;
pub mod output;
pub mod table;
pub mod terminal;
pub mod values;
