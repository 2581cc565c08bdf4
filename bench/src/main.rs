//! All benchmarks: the first argument names one. `cargo xtask bench` and `cargo xtask fleet` build this program, with
//! kplane's programs beside it, and run it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a benchmark that cannot go on has failed"
)]

mod against;
mod attacks;
mod beside;
mod change;
mod conntrack;
mod drift;
mod established;
mod fleet;
mod goal;
mod ipvs;
mod kube_proxies;
mod objects;
mod operators;
mod packet;
mod policies;
mod proxies;
mod reboot;
mod workload;

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use tokio::runtime::{Builder, Runtime};

/// A benchmark, which gets the program's name and the arguments after its own.
type Bench = fn(&[OsString]) -> Result<()>;

const BENCHES: [(&str, Bench); 15] = [
    ("change", |_| {
        change::main();
        Ok(())
    }),
    ("packet", |_| {
        packet::main();
        Ok(())
    }),
    ("drift", |_| {
        drift::main();
        Ok(())
    }),
    ("conntrack", |_| {
        conntrack::main();
        Ok(())
    }),
    ("graph", |_| {
        conntrack::reported::main();
        Ok(())
    }),
    ("fleet", fleet::main),
    ("reboot", |_| {
        reboot::main();
        Ok(())
    }),
    ("against", against::main),
    ("established", established::main),
    ("ipvs", ipvs::main),
    ("operators", |_| {
        operators::main();
        Ok(())
    }),
    ("policies", |_| {
        policies::main();
        Ok(())
    }),
    ("attacks", |_| {
        attacks::main();
        Ok(())
    }),
    ("beside", |_| {
        beside::main();
        Ok(())
    }),
    ("proxies", proxies::main),
];

fn main() -> ExitCode {
    let mut words: Vec<OsString> = env::args_os().collect();
    if words.len() < 2 {
        eprintln!("name a benchmark; {}", names());
        return ExitCode::from(2);
    }
    let named = words.remove(1);
    let Some((_, bench)) = BENCHES.iter().find(|(name, _)| named == *name) else {
        eprintln!("there is no benchmark {}; {}", named.display(), names());
        return ExitCode::from(2);
    };
    match bench(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:?}");
            ExitCode::FAILURE
        }
    }
}

fn names() -> String {
    let names = BENCHES.map(|(name, _)| name);
    format!("NAME is one of: {}", names.join(", "))
}

/// Makes a runtime of the calling thread alone.
fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Returns the path of one of kplane's programs, which cargo has built into the folder of this one.
fn program(name: &str) -> Result<PathBuf> {
    let program = env::current_exe()?.with_file_name(name);
    ensure!(program.is_file(), "{} is not built", program.display());
    Ok(program)
}
