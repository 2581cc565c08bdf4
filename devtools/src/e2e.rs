//! `cargo xtask test e2e`: Kubernetes' own end-to-end tests of networks, on real clusters, with kplane and with
//! kube-proxy. Results are committed in `docs/conformance`, and the page is made of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_rig::cluster::helm;
use kplane_rig::process::output;
use kplane_rig::real::{Balancer, Mode, NodePrograms, Options, Proxy, RealCluster, e2e, require};
use kplane_rig::userns;

mod ginkgo;
pub(crate) mod install;
mod page;
mod report;
mod specs;

use ginkgo::Ginkgo;
use install::Chart;
use report::{Outcome, Run};

/// The folder of logs and full reports, below the root of the checkout.
const LOGS: &str = ".cache/e2e";
/// The folder of committed results.
const RESULTS: &str = "docs/conformance";
const PAGE: &str = "docs/conformance.md";

/// Options of `cargo xtask test e2e`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Needs root, cgroups of version 1, and Go for the first start (5 to 15 minutes of building, then seconds).
One proxy in one mode takes about 15 minutes on two cores.

Examples:
  cargo xtask test e2e                                        both proxies in both modes, and the page
  cargo xtask test e2e --proxy kplane --mode nftables
  cargo xtask test e2e --proxy kplane --mode nftables --focus 'Services should be rejected'
  cargo xtask test e2e --proxy kplane --mode nftables --policies
  cargo xtask test e2e --again                                only what failed the last time, one spec at a time
  cargo xtask test e2e --page                                 only write the page from committed results")]
pub(crate) struct Args {
    /// A proxy to test; may be given more than once [default: both]
    #[arg(long, value_enum)]
    proxy: Vec<Name>,
    /// A mode to test, nftables or iptables; may be given more than once [default: both]
    #[arg(long)]
    mode: Vec<Mode>,
    /// Give Pods and Services both families of addresses
    #[arg(long)]
    dual_stack: bool,
    /// Nodes of a cluster, in zones a, b and c
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=9))]
    nodes: u8,
    /// Specs that run at a time
    #[arg(long, default_value_t = 6)]
    procs: u8,
    /// Run only the specs whose name matches this regular expression, and change neither results nor page
    #[arg(long)]
    focus: Option<String>,
    /// Run the specs of NetworkPolicies instead, which nodes of kplane enforce then; change neither results nor page
    #[arg(long, conflicts_with_all = ["again", "page"])]
    policies: bool,
    /// Run only the specs that failed in the committed results, one at a time, and update the results
    #[arg(long, conflicts_with = "focus")]
    again: bool,
    /// Run nothing, and write the page from the committed results
    #[arg(long)]
    page: bool,
    /// The folder of the images that `cargo xtask images` has written
    #[arg(long, hide = true, default_value = "target/images-of-tests")]
    images: PathBuf,
}

impl Args {
    /// Returns whether the run says nothing about the results that are committed.
    fn is_part(&self) -> bool {
        self.focus.is_some() || self.policies
    }
}

/// The name of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    /// kplane, installed by its chart with two replicas of the control plane, one of which is killed half-way
    Kplane,
    /// kube-proxy, as kubeadm installs it
    KubeProxy,
}

impl Name {
    const ALL: [Self; 2] = [Self::KubeProxy, Self::Kplane];

    fn text(self) -> &'static str {
        match self {
            Self::Kplane => report::KPLANE,
            Self::KubeProxy => report::KUBE_PROXY,
        }
    }
}

/// What all runs need.
struct Stage<'a> {
    args: &'a Args,
    root: &'static Path,
    tests: e2e::Programs,
    /// Archives of the tests' images.
    images: Vec<PathBuf>,
    helm: PathBuf,
}

/// Runs the tests, and writes the page.
pub(crate) fn run(args: &Args) -> Result<()> {
    let root = crate::workspace();
    if !args.page {
        let stage = prepare(args, root)?;
        userns::isolate()?;
        let mut failed = false;
        for (name, mode) in wanted(args) {
            let run =
                if args.again { stage.again(name, mode)? } else { Some(stage.run(name, mode)?) };
            let Some(run) = run else { continue };
            println!("{}", run.summary());
            failed |= run.specs.iter().any(|spec| spec.outcome == Outcome::Failed);
            if !args.is_part() {
                run.save(&root.join(RESULTS))?;
            }
        }
        if args.is_part() {
            ensure!(!failed, "specs have failed: see above");
            return Ok(());
        }
    }
    let runs = report::load(&root.join(RESULTS))?;
    let page = root.join(PAGE);
    fs::write(&page, page::render(&runs)).with_context(|| page.display().to_string())?;
    println!("{PAGE} is written");
    let worse = page::worse(&runs);
    ensure!(
        worse.is_empty(),
        "specs fail with kplane and pass with kube-proxy:\n{}",
        worse.join("\n")
    );
    Ok(())
}

fn wanted(args: &Args) -> Vec<(Name, Mode)> {
    let names = if args.proxy.is_empty() { &Name::ALL[..] } else { &args.proxy };
    let modes = if args.mode.is_empty() { &Mode::ALL[..] } else { &args.mode };
    modes.iter().flat_map(|mode| names.iter().map(|name| (*name, *mode))).collect()
}

/// Builds everything, while this process has the machine's network.
fn prepare<'a>(args: &'a Args, root: &'static Path) -> Result<Stage<'a>> {
    ensure!(require()?, "a real cluster cannot run on this machine");
    let missing: BTreeSet<&str> = e2e::REQUIRED
        .iter()
        .filter(|(program, _)| !is_there(program))
        .map(|(_, package)| *package)
        .collect();
    if !missing.is_empty() {
        let missing: Vec<_> = missing.into_iter().collect();
        bail!(
            "the tests' images need programs: apt-get install {}",
            missing.join(" ")
        );
    }
    let nodes = NodePrograms::ensure()?;
    let tests = e2e::Programs::ensure()?;
    Ok(Stage {
        images: e2e::archives(&tests, &nodes)?,
        helm: helm()?,
        args,
        root,
        tests,
    })
}

fn is_there(program: &str) -> bool {
    let mut command = Command::new("sh");
    command.args(["-c", "command -v \"$0\"", program]).stdout(Stdio::null());
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command.status().is_ok_and(|status| status.success())
}

fn today() -> Result<String> {
    let mut date = Command::new("date");
    date.args(["-u", "+%F"]);
    Ok(output(date)?.trim().to_owned())
}

impl Stage<'_> {
    /// Runs all tests on a cluster of its own.
    fn run(&self, name: Name, mode: Mode) -> Result<Run> {
        let args = self.args;
        let (cluster, _balancer) = self.cluster(name, mode)?;
        let folder = self.logs(name, mode);
        let ginkgo = self.ginkgo(&cluster, &folder);
        let mut killed = None;
        let half_way = || {
            if name == Name::Kplane {
                killed = Some(install::kill_replica(&cluster)?);
            }
            Ok(())
        };
        let focus = args.focus.as_deref();
        let selection = if args.policies {
            specs::Selection::policies(focus)
        } else {
            specs::Selection::new(focus, args.dual_stack)
        };
        let began = Instant::now();
        let mut specs = ginkgo.run("all", &selection, args.procs, half_way)?;
        let took = began.elapsed();
        ginkgo.again_alone(&mut specs)?;
        Ok(Run {
            proxy: name.text().to_owned(),
            mode: mode.to_string(),
            families: self.families().to_owned(),
            facts: self.facts(took.as_secs(), killed)?,
            specs,
        })
    }

    /// Runs only the specs that failed in the committed results; `None` without such specs.
    fn again(&self, name: Name, mode: Mode) -> Result<Option<Run>> {
        let runs = report::load(&self.root.join(RESULTS))?;
        let families = self.families();
        let found = runs.into_iter().find(|run| {
            run.proxy == name.text() && run.mode == mode.to_string() && run.families == families
        });
        let Some(mut run) = found.filter(|run| run.count(Outcome::Failed) > 0) else {
            return Ok(None);
        };
        let (cluster, _balancer) = self.cluster(name, mode)?;
        let folder = self.logs(name, mode);
        self.ginkgo(&cluster, &folder).again_alone(&mut run.specs)?;
        Ok(Some(run))
    }

    /// Starts a cluster with a proxy and a load balancer.
    fn cluster(&self, name: Name, mode: Mode) -> Result<(RealCluster, Balancer)> {
        let args = self.args;
        let began = Instant::now();
        println!("== {} {mode} {}", name.text(), self.families());
        let chart = Chart {
            root: self.root,
            images: &self.root.join(&args.images),
            helm: &self.helm,
            policies: args.policies,
            settings: &[],
        };
        let mut images = self.images.clone();
        let proxy = match name {
            Name::KubeProxy => Proxy::KubeProxy(mode),
            Name::Kplane => {
                images.extend(chart.archives());
                Proxy::None
            }
        };
        let cluster = RealCluster::start(&Options {
            nodes: args.nodes,
            dual_stack: args.dual_stack,
            proxy,
            localhost_node_ports: true,
            images,
            ..Options::default()
        })?;
        if name == Name::Kplane {
            chart.install(&cluster, mode, args.dual_stack)?;
        }
        let balancer = Balancer::start(&cluster)?;
        println!("the cluster is up after {:.0} s", began.elapsed().as_secs());
        Ok((cluster, balancer))
    }

    fn ginkgo<'a>(&'a self, cluster: &'a RealCluster, folder: &'a Path) -> Ginkgo<'a> {
        Ginkgo {
            tests: &self.tests,
            cluster,
            folder,
            nodes: self.args.nodes,
        }
    }

    /// Returns the folder of the logs of a proxy in a mode.
    fn logs(&self, name: Name, mode: Mode) -> PathBuf {
        let folder = format!("{}-{mode}-{}", name.text(), self.families()).to_lowercase();
        self.root.join(LOGS).join(folder)
    }

    fn families(&self) -> &'static str {
        if self.args.dual_stack { report::DUAL_STACK } else { report::IPV4 }
    }

    /// Returns what a reader must know to judge a result.
    fn facts(&self, seconds: u64, killed: Option<String>) -> Result<Vec<(String, String)>> {
        let words = |program: &str, args: &[&str]| {
            let mut command = Command::new(program);
            command.args(args).current_dir(self.root);
            output(command).map(|text| text.trim().to_owned())
        };
        let mut facts = vec![
            ("date", today()?),
            ("kubernetes", self.tests.version().to_owned()),
            ("kernel", words("uname", &["-r"])?),
            ("kplane", env!("CARGO_PKG_VERSION").to_owned()),
            ("nodes", self.args.nodes.to_string()),
            ("at a time", self.args.procs.to_string()),
            ("minutes", format!("{:.0}", seconds as f64 / 60.0)),
        ];
        facts.extend(killed.map(|pod| ("killed half-way", pod)));
        Ok(facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}
