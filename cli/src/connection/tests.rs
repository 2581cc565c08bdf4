use std::fs;

use clap::{CommandFactory as _, FromArgMatches as _};
use tempfile::TempDir;

use super::*;
use crate::args::Cli;

const KUBECONFIG: &str = "
current-context: a
clusters: [{name: a, cluster: {server: 'https://192.0.2.1:6443'}}]
contexts: [{name: a, context: {cluster: a, user: ''}}]
";

fn route(args: &[&str], kubeconfig: Option<&str>) -> String {
    let words = ["kpctl", "status"].iter().chain(args);
    let matches = Cli::command().try_get_matches_from(words).unwrap();
    let options = Cli::from_arg_matches(&matches).unwrap().options;
    let home = TempDir::new().unwrap();
    if let Some(text) = kubeconfig {
        fs::create_dir(home.path().join(".kube")).unwrap();
        fs::write(home.path().join(".kube/config"), text).unwrap();
    }
    let environment = Environment {
        variable: None,
        home: Some(home.path().to_owned()),
    };
    match Route::choose_in(&options, &environment) {
        Ok(route) => route.describe(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_way_depends_on_flags_and_files_alone() {
    let cluster = "https://192.0.2.1:6443 (context a)";
    let here = "http://127.0.0.1:7466";
    assert_eq!(route(&[], Some(KUBECONFIG)), cluster);
    assert_eq!(route(&[], None), here);
    assert_eq!(route(&[], Some("kind: Config")), here);
    let server = ["--server", "127.0.0.1:9"];
    assert_eq!(route(&server, Some(KUBECONFIG)), "http://127.0.0.1:9");
    // Even a broken kubeconfig is no concern of an address.
    assert_eq!(route(&server, Some("{")), "http://127.0.0.1:9");
    let authority = ["--certificate-authority", "ca.crt"];
    assert_eq!(route(&authority, None), "https://127.0.0.1:7466");
    assert_eq!(route(&authority, Some(KUBECONFIG)), cluster);
}

#[test]
fn a_broken_kubeconfig_says_how_to_do_without() {
    let error = route(&[], Some("{"));
    assert!(error.contains("is not a kubeconfig"), "{error}");
    assert!(error.contains("--server 127.0.0.1"), "{error}");
}
