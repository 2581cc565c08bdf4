//! All benchmarks: `cargo bench -p kplane-tests -- NAME` runs the one that the first argument names.

mod against;
mod change;
mod conntrack;
mod drift;
mod established;
mod fleet;
mod goal;
mod ipvs;
mod packet;
mod proxies;
mod reboot;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;

/// A benchmark, which gets the program's name and the arguments after its own.
type Bench = fn(&[OsString]) -> Result<()>;

const BENCHES: [(&str, Bench); 10] = [
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
    ("fleet", fleet::main),
    ("reboot", |_| {
        reboot::main();
        Ok(())
    }),
    ("against", against::main),
    ("established", established::main),
    ("ipvs", ipvs::main),
    ("proxies", proxies::main),
];

fn main() -> ExitCode {
    let mut words: Vec<OsString> = env::args_os().collect();
    // cargo test gives no argument, and must not measure for an hour.
    if words.len() == 1 {
        println!(
            "benchmarks: cargo bench -p kplane-tests -- NAME; {}",
            names()
        );
        return ExitCode::SUCCESS;
    }
    let named = words.remove(1);
    let Some((_, bench)) = BENCHES.iter().find(|(name, _)| named == *name) else {
        eprintln!("there is no benchmark {}; {}", named.display(), names());
        return ExitCode::from(2);
    };
    // cargo bench adds it.
    words.retain(|word| word != "--bench");
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
