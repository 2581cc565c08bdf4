//! The check whether rules can count packets on this machine.

use super::super::counting;
use super::super::rule::Counter;
use super::{PROBE, Tool};

impl Tool {
    /// Creates the counters; returns `false` if rules cannot use them on this machine. This is tried in a chain that
    /// no packet passes, because a rule that the kernel refuses would make a whole change fail. A network namespace to
    /// try it in would need a right that agents in Pods do not have.
    pub(in crate::backend::iptables) fn make_counters(&self) -> bool {
        let probe = |rule: &str| format!("*filter\n:{PROBE} - [0:0]\n{rule}\nCOMMIT\n");
        let counter = Counter::InvalidDropped.as_str();
        let rule = probe(&format!(
            "-A {PROBE} -m nfacct --nfacct-name {counter} -j DROP"
        ));
        let made = counting::make_all().map_err(|error| error.to_string());
        let usable = made.and_then(|()| self.restore(&rule).map_err(|error| error.to_string()));
        let gone = usable.as_ref().map(|()| self.restore(&probe(&format!("-X {PROBE}"))));
        if let Ok(Err(error)) = gone {
            tracing::info!(tool = self.name(), %error, "chain {PROBE} stays, through which no packet passes");
        }
        if let Err(error) = &usable {
            tracing::info!(
                tool = self.name(),
                %error,
                "packets that are dropped as invalid, or come for node ports on 127.0.0.1, are not counted: \
                 the kernel needs nfnetlink_acct and xt_nfacct"
            );
        }
        usable.is_ok()
    }
}
