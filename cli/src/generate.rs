//! `userdma generate`: man pages and shell completions, of this very program.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Args, Command, Subcommand};
use clap_complete::Shell;

/// Write man pages, or completions for a shell
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma generate man ~/.local/share/man/man1
  userdma generate completions bash > ~/.local/share/bash-completion/completions/userdma
  userdma generate completions zsh > ~/.zfunc/_userdma
  userdma generate completions fish > ~/.config/fish/completions/userdma.fish")]
pub(crate) struct Generate {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// A page for the program and one for each command
    Man {
        /// Where they go; made if it is not there
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
    /// To standard output
    Completions {
        /// For which shell
        shell: Shell,
    },
}

/// `program` is the whole command line.
pub(crate) fn run(args: &Generate, mut program: Command) -> Result<ExitCode> {
    match &args.what {
        What::Man { folder } => {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
            clap_mangen::generate_to(program, folder)
                .with_context(|| format!("cannot write into {}", folder.display()))?;
        }
        What::Completions { shell } => {
            let mut out = Vec::new();
            clap_complete::generate(*shell, &mut program, "userdma", &mut out);
            crate::output::line(String::from_utf8_lossy(&out).trim_end());
        }
    }
    Ok(ExitCode::SUCCESS)
}
