//! `cargo xtask bench`: speeds, printed as tables. Nothing here gates CI.

use anyhow::{Context, Result, ensure};

/// What is measured.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Compare with another proxy on a real API server, instead of measuring kplane alone: ten
    /// minutes, and the first time on a machine as long again to build Kubernetes with Go
    #[arg(long, value_name = "PROXY")]
    against: Option<Proxy>,

    /// Numbers of Services, separated by commas [default: 1000,5000,10000]
    #[arg(long, value_name = "NUMBERS", requires = "against")]
    services: Option<String>,

    /// Changes of one endpoint, for each proxy and size [default: 50]
    #[arg(long, value_name = "NUMBER", requires = "against")]
    changes: Option<u32>,

    /// Who is measured, of: kube-proxy-nftables, kube-proxy-iptables, kube-proxy-iptables-legacy,
    /// kplane-standalone, kplane, kplane-iptables, kplane-iptables-legacy [default: those of nftables]
    #[arg(long, value_name = "NAMES", requires = "against")]
    contenders: Option<String>,

    /// Put the results into docs/benchmarks.md and docs/benchmarks.svg
    #[arg(long, requires = "against")]
    write: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Proxy {
    KubeProxy,
    /// In mode ipvs, in a virtual machine; only --services and --changes count
    KubeProxyIpvs,
}

/// Builds everything as shipped and runs the benchmarks.
pub(crate) fn run(args: &Args) -> Result<()> {
    // The tests are built too, so that both builds take the same dependencies.
    let programs = ["kp-controlplane", "kp-nodeagent", "kplane-tests"];
    let programs = programs.map(|name| ["--package", name]);
    cargo(&[&["build", "--release"][..], &programs.concat()].concat())?;
    match args.against {
        Some(Proxy::KubeProxy) => bench("against", &args.options()),
        Some(Proxy::KubeProxyIpvs) => bench("ipvs", &args.options()),
        None => ["change", "drift", "packet", "conntrack"]
            .into_iter()
            .try_for_each(|name| bench(name, &[])),
    }
}

impl Args {
    /// Returns the options for the comparison program, which has the defaults.
    fn options(&self) -> Vec<String> {
        let changes = self.changes.map(|number| number.to_string());
        let values = [
            ("--services", &self.services),
            ("--changes", &changes),
            ("--contenders", &self.contenders),
        ];
        let given = values.into_iter().filter_map(|(flag, value)| {
            let value = value.as_ref()?;
            Some(format!("{flag}={value}"))
        });
        let write = self.write.then(|| "--write".to_owned());
        given.chain(write).collect()
    }
}

fn bench(name: &str, options: &[String]) -> Result<()> {
    let mut args = vec!["bench", "--package", "kplane-tests", "--bench", name, "--"];
    args.extend(options.iter().map(String::as_str));
    cargo(&args)
}

fn cargo(args: &[&str]) -> Result<()> {
    let mut command = kplane_tests::product::cargo();
    command.current_dir(crate::test::root()?).args(args);
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "cargo {}: {status}", args.join(" "));
    Ok(())
}
