//! `--config` and `--config-dir`, of every command that runs.

use std::path::PathBuf;

use clap::Args;

/// Files of settings.
#[derive(Clone, Debug, Args)]
pub struct FileArgs {
    /// YAML file with any of these settings, named without dashes. Flags and environment override it;
    /// an unknown key is an error
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory with one file per setting, named without dashes, such as a mounted ConfigMap. Flags,
    /// environment and --config override it. Unknown keys are ignored and listed in the log
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
}
