use super::lists::ServiceArgs;
use super::*;

#[test]
fn definition_is_consistent() {
    command(PROGRAM).debug_assert();
    command(PLUGIN).debug_assert();
}

#[test]
fn every_command_has_examples() {
    fn visit(command: &clap::Command) {
        let help = command.get_after_help().map(ToString::to_string);
        assert!(
            help.is_some_and(|help| help.contains("Examples:\n  kpctl ")),
            "{}",
            command.get_name()
        );
        command.get_subcommands().for_each(visit);
    }
    visit(&command(PROGRAM));
}

#[test]
fn help_knows_the_plugin_name() {
    let mut plugin = command(PLUGIN);
    let help = plugin.render_help().to_string();
    assert!(help.contains("Usage: kubectl kplane"), "{help}");
    assert!(help.contains("\n  kubectl kplane status "), "{help}");
    assert!(!help.contains("kpctl "), "{help}");
}

#[test]
fn timeouts() {
    let cases = [
        ("10s", Some(10_000)),
        ("500ms", Some(500)),
        ("1m30s", Some(90_000)),
        ("7", Some(7_000)),
        ("0", None),
        ("0s", None),
        ("-1s", None),
        ("soon", None),
    ];
    for (text, expected) in cases {
        let timeout = parse_timeout(text).ok();
        assert_eq!(timeout, expected.map(Duration::from_millis), "{text:?}");
    }
}

#[test]
fn service_names() {
    let cases = [
        ("shop/web", None, Some("shop/web")),
        ("web", None, Some("default/web")),
        ("web", Some("shop"), Some("shop/web")),
        ("shop/web", Some("shop"), Some("shop/web")),
        ("shop/web", Some("other"), None),
        ("/web", None, None),
        ("shop/", None, None),
        ("a/b/c", None, None),
    ];
    for (service, namespace, expected) in cases {
        let args = ServiceArgs {
            service: service.to_owned(),
            namespace: namespace.map(str::to_owned),
        };
        let name = args.name().ok().map(|name| name.to_string());
        assert_eq!(name.as_deref(), expected, "{service:?} -n {namespace:?}");
    }
}
