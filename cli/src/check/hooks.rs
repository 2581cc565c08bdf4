//! What is wrong with the preStop hooks of a Pod template.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// The path of hooks that agents answer.
pub(super) const PATH: &str = "/gone";
/// The port at which agents answer, unless their DaemonSet names another one.
pub(super) const PORT: u16 = 7468;
/// The flag of agents that names the port.
pub(super) const FLAG: &str = "--pre-stop-port=";
/// Longest time of a wait for which the hook names none.
const WITHIN: Duration = Duration::from_secs(10);
/// `terminationGracePeriodSeconds` of a Pod that names none.
const GRACE: u64 = 30;

/// The fields of a Pod that matter here.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct PodSpec {
    pub(super) containers: Vec<Container>,
    termination_grace_period_seconds: Option<u64>,
    host_network: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Container {
    pub(super) lifecycle: Lifecycle,
    ports: Vec<ContainerPort>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerPort {
    name: String,
    container_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Lifecycle {
    pub(super) pre_stop: Option<Hook>,
}

/// A preStop hook. `sleep` and `exec` may take any time.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Hook {
    http_get: Option<HttpGet>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct HttpGet {
    path: String,
    host: String,
    scheme: String,
    /// A number, or the name of a port of the container.
    port: Value,
}

impl Hook {
    /// Returns whether the hook asks an agent, by its path.
    pub(super) fn asks(&self) -> bool {
        let path = self.http_get.as_ref().map(|get| &*get.path);
        path.is_some_and(|path| path.split('?').next() == Some(PATH))
    }
}

impl Container {
    fn port(&self, wanted: &Value) -> Option<u16> {
        match wanted {
            Value::String(name) => {
                let named = self.ports.iter().find(|port| port.name == *name);
                named.map_or_else(|| name.parse().ok(), |port| Some(port.container_port))
            }
            number => number.as_u64().and_then(|port| port.try_into().ok()),
        }
    }
}

impl PodSpec {
    /// Returns what is wrong with hooks of the Pod, human-readable. Agents answer at a port; 0 = they answer none.
    pub(super) fn faults(&self, port: u16) -> Vec<String> {
        let mut faults = Vec::new();
        for container in &self.containers {
            let hook = container.lifecycle.pre_stop.as_ref();
            let get = hook.and_then(|hook| hook.http_get.as_ref());
            let Some(get) = get else { continue };
            let at = container.port(&get.port);
            let asks = hook.is_some_and(Hook::asks);
            if asks || (port > 0 && at == Some(port)) {
                self.faults_of(get, (at, port), &mut faults);
            }
        }
        let ports = self.containers.iter().flat_map(|container| &container.ports);
        if port > 0 && ports.into_iter().any(|of| of.container_port == port) {
            faults.push(format!(
                "a container serves at port {port} of the hooks: kubelet's probes there reach the agent"
            ));
        }
        faults.sort();
        faults.dedup();
        faults
    }

    fn faults_of(&self, get: &HttpGet, (at, port): (Option<u16>, u16), faults: &mut Vec<String>) {
        let (path, query) = get.path.split_once('?').unwrap_or((&get.path, ""));
        if port == 0 {
            faults.push("agents answer no hooks (preStop.enabled=true of the chart)".to_owned());
        } else if at != Some(port) {
            let at = at.map_or_else(|| get.port.to_string(), |at| at.to_string());
            faults.push(format!("port {at}: agents answer at {port}"));
        }
        if path != PATH {
            faults.push(format!("path {path}: agents answer {PATH}"));
        }
        if get.scheme == "HTTPS" {
            faults.push("scheme HTTPS: agents answer HTTP".to_owned());
        }
        let own = matches!(&*get.host, "127.0.0.1" | "::1" | "localhost");
        let value = |wanted: &str| {
            query
                .split('&')
                .filter_map(|pair| pair.split_once('='))
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| value)
        };
        if self.host_network && !(own && value("port").is_some()) {
            faults.push(format!(
                "a Pod in the node's own network needs host 127.0.0.1 and path {PATH}?port=PORT with the port that it serves"
            ));
        } else if !self.host_network && !get.host.is_empty() {
            faults.push(format!(
                "host {}: kubelet must ask the Pod's own address",
                get.host
            ));
        }
        let text = value("within");
        let within = text.map_or(Some(WITHIN), time);
        let grace = self.termination_grace_period_seconds.unwrap_or(GRACE);
        match (within, text.unwrap_or_default()) {
            (None, text) => faults.push(format!(
                "within={text} is no time, and has no effect: write such as 25s"
            )),
            (Some(_), text) if text.ends_with(|last: char| last.is_ascii_digit()) => {
                faults.push(format!(
                    "within={text} has no unit, and is taken for seconds"
                ));
            }
            (Some(_), _) => {}
        }
        let within = within.unwrap_or(WITHIN).as_secs_f64();
        if within >= Duration::from_secs(grace).as_secs_f64() {
            faults.push(format!(
                "the hook may take {within} s, and terminationGracePeriodSeconds is {grace}: no time is left to end"
            ));
        }
    }
}

/// Reads a time as agents do.
fn time(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let millis = match unit {
        "ms" => 1,
        "s" | "" => 1_000,
        "m" => 60_000,
        _ => return None,
    };
    let number: u64 = number.parse().ok()?;
    Some(Duration::from_millis(number.saturating_mul(millis)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the faults of a Pod with other fields than one that is right.
    fn of(get: &Value, pod: &Value) -> Vec<String> {
        let mut hook = json!({"path": "/gone", "port": 7468, "scheme": "HTTP"});
        let mut spec = json!({"terminationGracePeriodSeconds": 30});
        for (all, others) in [(&mut hook, get), (&mut spec, pod)] {
            let others = others.as_object().unwrap().clone();
            all.as_object_mut().unwrap().extend(others);
        }
        let ports =
            json!([{"name": "hooks", "containerPort": spec["serves"].as_u64().unwrap_or(80)}]);
        spec["containers"] = json!([{"lifecycle": {"preStop": {"httpGet": hook}}, "ports": ports}]);
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        spec.faults(PORT)
    }

    #[test]
    fn a_hook_that_is_right_has_no_faults() {
        let none = json!({});
        for get in [
            json!({}),
            json!({"path": "/gone?within=25s"}),
            json!({"path": "/gone?within=1500ms&port=80"}),
            json!({"port": "7468"}),
        ] {
            assert_eq!(of(&get, &none), [] as [&str; 0], "{get}");
        }
        let own = json!({"host": "127.0.0.1", "path": "/gone?port=8080"});
        assert_eq!(of(&own, &json!({"hostNetwork": true})), [] as [&str; 0]);
    }

    #[test]
    fn a_hook_that_fails_or_takes_too_long_is_told() {
        for (get, pod, wanted) in [
            (
                json!({"port": 7448}),
                json!({}),
                "port 7448: agents answer at 7468",
            ),
            (
                json!({"port": "hooks"}),
                json!({}),
                "port 80: agents answer at 7468",
            ),
            (
                json!({"port": "other"}),
                json!({}),
                "port \"other\": agents answer at 7468",
            ),
            (
                json!({"path": "/goner"}),
                json!({}),
                "path /goner: agents answer /gone",
            ),
            (json!({"scheme": "HTTPS"}), json!({}), "scheme HTTPS"),
            (
                json!({"host": "web.example"}),
                json!({}),
                "host web.example",
            ),
            (
                json!({}),
                json!({"hostNetwork": true}),
                "needs host 127.0.0.1",
            ),
            (
                json!({"path": "/gone?within=20"}),
                json!({}),
                "within=20 has no unit",
            ),
            (
                json!({"path": "/gone?within=1h"}),
                json!({}),
                "within=1h is no time",
            ),
            (
                json!({"path": "/gone?within=1m"}),
                json!({}),
                "may take 60 s, and terminationGracePeriodSeconds is 30",
            ),
            (
                json!({}),
                json!({"terminationGracePeriodSeconds": 5}),
                "may take 10 s",
            ),
            (
                json!({}),
                json!({"serves": 7468}),
                "a container serves at port 7468",
            ),
        ] {
            let faults = of(&get, &pod);
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].contains(wanted), "{faults:?} and not {wanted}");
        }
    }

    #[test]
    fn hooks_of_other_programs_are_theirs() {
        let other = json!({"path": "/quit", "port": 8080, "host": "web"});
        assert_eq!(of(&other, &json!({})), [] as [&str; 0]);
    }
}
