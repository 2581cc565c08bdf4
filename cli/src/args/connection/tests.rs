use clap::{CommandFactory as _, FromArgMatches as _};

use super::*;
use crate::args::Cli;

/// The options of a command line, checked.
fn options(args: &[&str]) -> Result<crate::args::Options, clap::Error> {
    let words = ["kpctl", "status"].iter().chain(args);
    let matches = Cli::command().try_get_matches_from(words)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.options.complete(&matches)?;
    Ok(cli.options)
}

fn server(args: &[&str]) -> Option<String> {
    let server = options(args).unwrap().place.server;
    server.map(|server| server.url)
}

#[test]
fn servers() {
    let cases = [
        ("127.0.0.1:7466", Some("http://127.0.0.1:7466")),
        ("http://127.0.0.1:9", Some("http://127.0.0.1:9")),
        ("http://cp.example/", Some("http://cp.example:7466")),
        ("cp", Some("http://cp:7466")),
        ("fd00::1", Some("http://[fd00::1]:7466")),
        ("[fd00::1]:9", Some("http://[fd00::1]:9")),
        ("https://cp", Some("https://cp:7466")),
        ("ftp://cp", None),
        ("", None),
        (":7466", None),
        ("cp:99999", None),
        ("cp/path", None),
        ("c p", None),
    ];
    for (text, expected) in cases {
        let server = parse_server(text).ok().map(|server| server.url);
        assert_eq!(server.as_deref(), expected, "{text:?}");
    }
}

#[test]
fn an_address_or_a_cluster_but_not_both() {
    assert_eq!(server(&[]), None);
    assert_eq!(server(&["--context", "prod"]), None);
    let url = "http://127.0.0.1:7466";
    assert_eq!(server(&["--server", "127.0.0.1"]).as_deref(), Some(url));
    for flag in ["--context", "--kubeconfig", "--kplane-namespace"] {
        let args = ["--server", "127.0.0.1", flag, "x"];
        let error = options(&args).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{flag}");
        assert!(error.to_string().contains(flag), "{error}");
    }
}

#[test]
fn a_token_goes_nowhere_in_plain_text() {
    let token = ["--token-file", "t"];
    let with = |args: &[&str]| options(&[args, &token].concat()).map(drop);
    with(&[]).unwrap();
    with(&["--server", "localhost"]).unwrap();
    with(&["--server", "cp", "--certificate-authority", "ca"]).unwrap();
    let refused = with(&["--server", "cp", "--insecure"]).unwrap_err();
    assert!(refused.to_string().contains("plain text"), "{refused}");
    options(&["--server", "cp", "--insecure"]).unwrap();
}

#[test]
fn certificate_and_key_belong_together() {
    options(&["--client-certificate", "c", "--client-key", "k"]).unwrap();
    for flag in ["--client-certificate", "--client-key"] {
        let error = options(&[flag, "x"]).unwrap_err();
        assert!(error.to_string().contains("belong together"), "{error}");
    }
}

#[test]
fn namespaces() {
    let long = "a".repeat(64);
    let cases = [
        ("kplane", true),
        ("a", true),
        ("", false),
        ("../kube-system", false),
        ("Kplane", false),
        ("a.b", false),
        (&long, false),
    ];
    for (text, valid) in cases {
        assert_eq!(parse_namespace(text).is_ok(), valid, "{text:?}");
    }
}
