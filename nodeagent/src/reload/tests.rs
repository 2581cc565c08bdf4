//! Tests of applying changes of the file (I3).

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::config::kube_proxy::KubeProxyFlags;

struct Rig {
    folder: TempDir,
    reloader: Reloader,
    effective: Effective,
}

impl Rig {
    fn new(fields: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("config.conf");
        fs::write(&path, text(fields)).unwrap();
        let loader = Loader::new(path, KubeProxyFlags::default());
        let config = loader.load().unwrap().config;
        Self {
            folder,
            reloader: Reloader::new(loader),
            effective: Effective::new(Arc::new(config)),
        }
    }

    fn write(&mut self, text: &str) -> Option<NodeSettings> {
        fs::write(self.folder.path().join("config.conf"), text).unwrap();
        self.reloader.look(&self.effective)
    }

    fn say(&mut self, fields: &str) -> Option<NodeSettings> {
        self.write(&text(fields))
    }

    fn effective(&self) -> KubeProxyConfiguration {
        (**self.effective.borrow()).clone()
    }
}

fn text(fields: &str) -> String {
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
         mode: nftables\n{fields}"
    )
}

#[test]
fn i3_what_can_be_is_taken_over_and_the_rest_waits() {
    let mut rig = Rig::new("clusterCIDR: 10.0.0.0/8\n");
    let settings = rig
        .say("clusterCIDR: 11.0.0.0/8\nnftables: {masqueradeAll: true, masqueradeBit: 7}\n")
        .unwrap();
    assert_eq!(settings.cluster_cidrs, ["11.0.0.0/8".parse().unwrap()]);
    assert!(settings.masquerade_all);
    let effective = rig.effective();
    assert_eq!(effective.cluster_cidr, "11.0.0.0/8");
    assert_eq!(effective.nftables.masquerade_bit, 14, "needs a restart");
    // Fields that wait for a restart keep waiting, and do not block others.
    let settings = rig.say("clusterCIDR: 12.0.0.0/8\nnftables: {masqueradeBit: 7}\n").unwrap();
    assert_eq!(settings.cluster_cidrs, ["12.0.0.0/8".parse().unwrap()]);
    assert!(!settings.masquerade_all);
}

#[test]
fn i3_a_wrong_file_changes_nothing_and_a_right_one_heals() {
    let mut rig = Rig::new("clusterCIDR: 10.0.0.0/8\n");
    let before = rig.effective();
    assert_eq!(rig.say("clusterCIDR: 10.0.0.0\noomScoreAdj: 0\n"), None);
    assert_eq!(rig.write("half a fi"), None);
    assert_eq!(rig.write(""), None);
    fs::remove_file(rig.folder.path().join("config.conf")).unwrap();
    assert_eq!(rig.reloader.look(&rig.effective), None);
    assert_eq!(rig.effective(), before);
    assert_eq!(rig.say("clusterCIDR: 10.0.0.0/8\n"), None, "as it was");
    assert!(rig.say("clusterCIDR: 11.0.0.0/8\n").is_some());
}

#[test]
fn i3_a_file_that_says_the_same_is_no_change() {
    let mut rig = Rig::new("clusterCIDR: 10.0.0.0/8\n");
    let mut changes = rig.effective.subscribe();
    assert_eq!(
        rig.say("# a comment\nclusterCIDR: 10.0.0.0/8\nmetricsBindAddress: ''\n"),
        None
    );
    assert!(!changes.has_changed().unwrap());
    assert!(rig.say("logging: {verbosity: 4}\nclusterCIDR: 10.0.0.0/8\n").is_some());
    assert_eq!(changes.borrow_and_update().logging.verbosity, 4);
}

/// The range was not checked while the mode was another one.
#[test]
fn i3_fields_that_do_not_go_together_are_refused() {
    let mut rig = Rig::new("clusterCIDR: 10.0.0.0/8\n");
    let before = rig.effective();
    let mixed = "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cbr0}\n\
                 clusterCIDR: nonsense\n";
    assert_eq!(rig.say(mixed), None);
    assert_eq!(rig.effective(), before);
}

/// Problems and fields that wait for a restart are logged once, and not after every touch of the
/// file.
#[test]
fn i3_the_same_news_is_no_news() {
    let mut rig = Rig::new("clusterCIDR: 10.0.0.0/8\n");
    let running = rig.effective();
    let waits = KubeProxyConfiguration {
        oom_score_adj: 0,
        ..running.clone()
    };
    let wrong = ConfigError {
        problems: Vec::new(),
    };
    for (outcome, is_news) in [
        (Ok(running.clone()), false),
        (Ok(waits.clone()), true),
        (Ok(waits.clone()), false),
        (Err(wrong.clone()), true),
        (Err(wrong), false),
        (Ok(waits), true),
        (Ok(running.clone()), true),
    ] {
        assert_eq!(rig.reloader.is_news(outcome, &running), is_news);
    }
}
