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
fn help_lists_each_command_once_and_options_lists_what_it_leaves_out() {
    let mut short = help::brief(command(PROGRAM), PROGRAM);
    let named: Vec<_> = help::GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
    let shown = short.get_subcommands().filter(|sub| !sub.is_hide_set());
    let mut wanted: Vec<_> = shown.map(clap::Command::get_name).collect();
    let mut sorted = named.clone();
    sorted.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(sorted, wanted);
    let (text, all) = (short.render_help().to_string(), options(PROGRAM));
    for flag in ["--server <", "--token-file <", "--timeout <"] {
        assert!(!text.contains(flag) && all.contains(flag), "{flag}: {text}");
    }
    assert!(text.contains("--output <FORMAT>"), "{text}");
    assert!(
        options(PLUGIN).contains("\n  kubectl kplane options"),
        "{all}"
    );
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
        ("service/shop/web", None, Some("shop/web")),
        ("service/web", None, Some("service/web")),
    ];
    for (service, namespace, expected) in cases {
        let args = ServiceArgs {
            service: service.to_owned(),
            namespace: namespace.map(str::to_owned),
            all: false,
        };
        let name = args.name().ok().map(|name| name.to_string());
        assert_eq!(name.as_deref(), expected, "{service:?} -n {namespace:?}");
    }
}

/// Returns the command that a line begins with, without what follows it: a comment, an explanation, another command.
fn typed(line: &str) -> &str {
    let ends = [" #", "  ", " | ", " && ", " > "];
    let end = ends.iter().filter_map(|end| line.find(end)).min();
    line[..end.unwrap_or(line.len())].trim_end()
}

/// Returns the words of a command; quotes keep blanks.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in command.chars() {
        match (c, quote) {
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            (' ', None) => words.push(String::new()),
            (c, _) => words.last_mut().unwrap().push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Fails unless kpctl takes a command that a text shows.
fn takes(place: &str, command: &str) {
    let parsed = Cli::try_parse_from(words(command));
    let error = parsed.err().filter(|error| {
        let shown = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
        !shown.contains(&error.kind())
    });
    assert!(error.is_none(), "{place}: {command}: {}", error.unwrap());
}

#[test]
fn each_documented_command_is_one_that_kpctl_takes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = vec![root.join("README.md")];
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    // Its examples are those of the help texts, which another test reads.
    files.extend(docs.filter(|file| !file.ends_with("cli.md")));
    let mut found = 0;
    for file in files.iter().filter(|file| file.extension().is_some_and(|of| of == "md")) {
        let text = std::fs::read_to_string(file).unwrap().replace("\\\n", " ");
        let lines = text.lines().filter(|line| line.starts_with("    "));
        for line in lines.map(str::trim).filter(|line| line.starts_with("kpctl ")) {
            takes(&file.display().to_string(), typed(line));
            found += 1;
        }
    }
    assert!(found > 50, "{found} commands");
}

#[test]
fn each_example_is_one_that_kpctl_takes() {
    fn visit(command: &clap::Command) {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        for line in help
            .lines()
            .filter_map(|line| line.strip_prefix("  "))
            .filter(|line| line.starts_with("kpctl "))
        {
            takes(command.get_name(), typed(line));
        }
        command.get_subcommands().for_each(visit);
    }
    visit(&command(PROGRAM));
}

#[test]
fn a_kind_and_a_name_may_be_one_word() {
    let spread = |line: &str| {
        let words = line.split(' ').map(OsString::from).collect();
        let spread = spread(&command(PROGRAM), words);
        let text: Vec<_> = spread.into_iter().map(|word| word.into_string().unwrap()).collect();
        text.join(" ")
    };
    for (line, expected) in [
        (
            "kpctl describe service/shop/web",
            "kpctl describe service shop/web",
        ),
        ("kpctl -o json get node/n1", "kpctl -o json get node n1"),
        ("kpctl get services shop/web", "kpctl get services shop/web"),
        ("kpctl get shop/web", "kpctl get shop/web"),
        ("kpctl why service/shop/web", "kpctl why service/shop/web"),
    ] {
        assert_eq!(spread(line), expected);
    }
}

#[test]
fn declared_kinds_are_words_of_get_and_first_words() {
    let parse = |line: &str| {
        let matches = command(PROGRAM).try_get_matches_from(line.split(' '));
        matches
            .and_then(|matches| Cli::from_arg_matches(&matches))
            .map(|cli| cli.command)
    };
    for line in [
        "kpctl get affinity web -n shop --client ::1",
        "kpctl affinity shop/web --client ::1",
    ] {
        let (Command::Get(GetCommand::Declared(of)) | Command::Listed(FirstWord(of))) =
            parse(line).unwrap()
        else {
            panic!("{line}");
        };
        let text = |field: &str| {
            let value = of.request.get_field_by_name(field).unwrap();
            value.as_str().unwrap().to_owned()
        };
        assert_eq!(
            ["namespace", "name", "client", "node"].map(text),
            ["shop", "web", "::1", ""]
        );
    }
    for wrong in [
        "kpctl get affinity",
        "kpctl get affinity shop/web --client x",
        "kpctl get events --limit x",
    ] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
    assert!(
        parse("kpctl get events --watch --limit 7").is_ok() && parse("kpctl drain-status").is_ok()
    );
}
