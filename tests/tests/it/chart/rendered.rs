//! Files in the tree that Helm renders from the chart, and what must hold of every rendering.
//!
//! `UPDATE_EXPECT=1 cargo test -p kplane-tests --test it -- chart` writes the files again.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use kplane_tests::chart::{find, objects, root};
use kplane_tests::cluster::Programs;
use kplane_tests::process::output;
use serde_json::{Value, json};

use super::{Rendering, chart, renderings};

/// The first lines of files that are rendered.
const HEADER: &str = "# Rendered from deploy/chart with its default values: edit that, and run\n\
    # UPDATE_EXPECT=1 cargo test -p kplane-tests --test it -- chart\n";
/// The namespace, which Helm makes by --create-namespace. Agents are privileged.
const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: kplane\n  labels:\n    \
    pod-security.kubernetes.io/enforce: privileged\n";

/// Compares a file with what it must be, or writes it.
pub(super) fn compare(path: &str, expected: &str) -> Result<()> {
    let file = root().join(path);
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        return fs::write(&file, expected).with_context(|| file.display().to_string());
    }
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    ensure!(
        text == expected,
        "{path} is not what deploy/chart says: UPDATE_EXPECT=1 writes it"
    );
    Ok(())
}

pub(in crate::chart) fn the_base_of_kustomize_is_the_rendered_chart() -> Result<()> {
    let chart = chart()?;
    let rendered = chart.text(&[], &[])?;
    compare(
        "deploy/kustomize/kplane.yaml",
        &format!("{HEADER}{rendered}"),
    )?;
    compare(
        "deploy/kustomize/namespace.yaml",
        &format!("{HEADER}{NAMESPACE}"),
    )
}

/// kubectl has kustomize.
pub(in crate::chart) fn kustomize_changes_nothing_of_the_chart() -> Result<()> {
    let chart = chart()?;
    let mut kubectl = Programs::ensure()?.command("kubectl");
    kubectl.arg("kustomize").arg(root().join("deploy/kustomize"));
    let built = objects(&output(kubectl)?)?;
    let mut expected = chart.objects(&[])?;
    expected.extend(objects(NAMESPACE)?);
    let texts =
        |objects: &[Value]| -> BTreeSet<String> { objects.iter().map(Value::to_string).collect() };
    let (built, expected) = (texts(&built), texts(&expected));
    let differ: Vec<_> = built.symmetric_difference(&expected).collect();
    ensure!(differ.is_empty(), "{differ:#?}");
    Ok(())
}

pub(in crate::chart) fn the_rights_without_helm_are_those_of_the_chart() -> Result<()> {
    let chart = chart()?;
    let only = ["serviceaccounts", "rbac"].map(|name| format!("templates/{name}.yaml"));
    let options = only.iter().flat_map(|name| ["--show-only", name]);
    let rendered = chart.text(&[], &options.collect::<Vec<_>>())?;
    let text = format!("{HEADER}{NAMESPACE}{rendered}");
    compare("deploy/kubernetes/rbac.yaml", &text)
}

fn pod<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    Ok(&find(objects, kind, name)?["spec"]["template"]["spec"])
}

pub(in crate::chart) fn containers_have_no_more_rights_than_they_need() -> Result<()> {
    let renderings = renderings()?;
    for Rendering { settings, objects } in renderings {
        let plane = pod(objects, "Deployment", "kplane-controlplane")?;
        let agent = pod(objects, "DaemonSet", "kplane-nodeagent")?;
        let of_plane = &plane["containers"][0]["securityContext"];
        ensure!(plane["securityContext"]["runAsNonRoot"] == true, "{plane}");
        ensure!(
            of_plane["capabilities"] == json!({ "drop": ["ALL"] }),
            "{of_plane}"
        );
        let of_agent = &agent["containers"][0];
        let image = of_agent["image"].as_str().unwrap_or_default();
        let added = if image.ends_with("-iptables") {
            json!(["NET_ADMIN", "NET_RAW"])
        } else {
            json!(["NET_ADMIN"])
        };
        let of_agent = &of_agent["securityContext"];
        let capabilities = json!({ "drop": ["ALL"], "add": added });
        ensure!(
            of_agent["capabilities"] == capabilities,
            "{settings:?}: {of_agent}"
        );
        for context in [of_plane, of_agent] {
            ensure!(context["readOnlyRootFilesystem"] == true, "{context}");
            ensure!(context["allowPrivilegeEscalation"] == false, "{context}");
        }
        ensure!(agent["automountServiceAccountToken"] == false, "{agent}");
        ensure!(
            agent["tolerations"] == json!([{ "operator": "Exists" }]),
            "{agent}"
        );
    }
    Ok(())
}

/// Rules get old on the node of an agent that hangs, however long its connections may go on otherwise.
pub(in crate::chart) fn an_agent_that_hangs_is_replaced_within_half_a_minute() -> Result<()> {
    for Rendering { settings, objects } in renderings()? {
        let agent = pod(objects, "DaemonSet", "kplane-nodeagent")?;
        let probe = &agent["containers"][0]["livenessProbe"];
        let seconds = |field: &str| probe[field].as_u64().context(field.to_owned());
        let (period, timeout) = (seconds("periodSeconds")?, seconds("timeoutSeconds")?);
        let failures = seconds("failureThreshold")?;
        let replaced = period * failures + timeout + seconds("terminationGracePeriodSeconds")?;
        ensure!(replaced <= 30, "{settings:?}: {replaced} s: {probe}");
        // A machine without a free processor for seconds is no reason.
        ensure!(failures >= 3 && timeout >= 3, "{settings:?}: {probe}");
    }
    Ok(())
}

/// Neither agents nor other replicas use an address that kplane itself has to serve.
pub(in crate::chart) fn nothing_waits_for_a_cluster_ip() -> Result<()> {
    let renderings = renderings()?;
    for Rendering { settings, objects } in renderings {
        let service = find(objects, "Service", "kplane-controlplane")?;
        ensure!(service["spec"]["clusterIP"] == "None", "{service}");
        let agent = pod(objects, "DaemonSet", "kplane-nodeagent")?;
        ensure!(
            agent["hostNetwork"] == true && agent["dnsPolicy"] == "Default",
            "{agent}"
        );
        let args = agent["containers"][0]["args"].to_string();
        ensure!(!args.contains("--control-plane=kplane"), "{args}");
        let named = settings.iter().any(|setting| setting.starts_with("controlPlane.addresses"));
        ensure!(
            args.contains("--control-plane-file=") != named,
            "{settings:?}: {args}"
        );
    }
    Ok(())
}

pub(in crate::chart) fn the_api_servers_own_address_is_what_replicas_use() -> Result<()> {
    let chart = chart()?;
    let variable = |settings: &[&str]| -> Result<Option<Value>> {
        let objects = chart.objects(settings)?;
        let plane = pod(&objects, "Deployment", "kplane-controlplane")?;
        Ok(plane["containers"][0]["env"]
            .as_array()
            .context("no env")?
            .iter()
            .find(|variable| variable["name"] == "KUBERNETES_SERVICE_HOST")
            .cloned())
    };
    ensure!(variable(&[])?.is_none());
    let named = variable(&["kubernetesServiceHost=2001:db8::1"])?.context("not set")?;
    ensure!(named["value"] == "2001:db8::1", "{named}");
    let of_node = variable(&["kubernetesServiceHost=hostIP"])?.context("not set")?;
    let field = &of_node["valueFrom"]["fieldRef"]["fieldPath"];
    ensure!(field == "status.hostIP", "{of_node}");
    Ok(())
}

pub(in crate::chart) fn during_a_migration_agents_run_on_nodes_with_the_label_only() -> Result<()> {
    let chart = chart()?;
    let affinity = |settings: &[&str]| -> Result<Value> {
        let objects = chart.objects(settings)?;
        let agent = pod(&objects, "DaemonSet", "kplane-nodeagent")?;
        Ok(
            agent["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
                .clone(),
        )
    };
    ensure!(affinity(&[])?.is_null());
    let required = affinity(&["migration.enabled=true"])?;
    let expected = json!({ "nodeSelectorTerms": [{ "matchExpressions": [
        { "key": "kplane.io/proxy", "operator": "In", "values": ["kplane"] },
    ] }] });
    ensure!(required == expected, "{required}");
    Ok(())
}
