use std::fs;

use secrecy::ExposeSecret as _;
use tempfile::TempDir;

use super::*;

/// A kubeconfig with one entry of each kind, all with this name.
fn kubeconfig(name: &str, current: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: {current:?}\n\
         clusters: [{{name: {name}, cluster: {{server: 'https://{name}.example:6443'}}}}]\n\
         users: [{{name: {name}, user: {{token: token-of-{name}}}}}]\n\
         contexts: [{{name: {name}, context: {{cluster: {name}, user: {name}}}}}]\n"
    )
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// An environment with these files in `KUBECONFIG`, and this folder as home.
    fn environment(&self, files: &[PathBuf]) -> Environment {
        Environment {
            variable: (!files.is_empty()).then(|| env::join_paths(files).unwrap()),
            home: Some(self.0.path().to_owned()),
        }
    }
}

fn place(kubeconfig: Option<&Path>, context: Option<&str>) -> Place {
    Place {
        server: None,
        kubeconfig: kubeconfig.map(Path::to_owned),
        context: context.map(str::to_owned),
        kplane_namespace: "kplane".to_owned(),
        names_cluster: kubeconfig.is_some() || context.is_some(),
    }
}

fn selected(place: &Place, environment: &Environment) -> Selected {
    match select(place, environment).unwrap() {
        Selection::Selected(selected) => *selected,
        Selection::Nothing(reason) => panic!("nothing: {reason}"),
    }
}

fn nothing(environment: &Environment) -> String {
    match select(&place(None, None), environment).unwrap() {
        Selection::Selected(selected) => panic!("{}", selected.context),
        Selection::Nothing(reason) => reason,
    }
}

fn error(place: &Place, environment: &Environment) -> String {
    match select(place, environment) {
        Err(error) => error.to_string(),
        Ok(Selection::Selected(selected)) => panic!("{}", selected.context),
        Ok(Selection::Nothing(reason)) => panic!("nothing: {reason}"),
    }
}

#[test]
fn the_flag_comes_before_the_variable_and_that_before_the_default() {
    let folder = Folder::new();
    folder.write(".kube/config", &kubeconfig("home", "home"));
    let variable = folder.write("variable", &kubeconfig("variable", "variable"));
    let flag = folder.write("flag", &kubeconfig("flag", "flag"));
    let (with, without) = (folder.environment(&[variable]), folder.environment(&[]));
    assert_eq!(selected(&place(Some(&flag), None), &with).context, "flag");
    assert_eq!(selected(&place(None, None), &with).context, "variable");
    assert_eq!(selected(&place(None, None), &without).context, "home");
    // Like kubectl, an empty variable is none.
    let empty = folder.environment(&[PathBuf::new()]);
    assert_eq!(selected(&place(None, None), &empty).context, "home");
}

#[test]
fn files_are_merged_and_the_first_wins() {
    let folder = Folder::new();
    let first = folder.write("first", &kubeconfig("a", ""));
    let other = kubeconfig("a", "b").replace("token-of-a", "another");
    let second = folder.write("second", &other);
    let third = folder.write("third", &kubeconfig("b", "c"));
    let absent = folder.path("absent");
    let environment = folder.environment(&[absent, first, second, third]);
    let found = selected(&place(None, None), &environment);
    assert_eq!(found.context, "b");
    assert_eq!(found.config.cluster_url.host(), Some("b.example"));
    let found = selected(&place(None, Some("a")), &environment);
    let token = found.config.auth_info.token.unwrap();
    assert_eq!(token.expose_secret(), "token-of-a");
}

#[test]
fn paths_are_relative_to_the_file_that_names_them() {
    let folder = Folder::new();
    let text = kubeconfig("a", "a").replace(
        "{token: token-of-a}",
        "{client-certificate: c.crt, client-key: ../c.key, tokenFile: t}",
    );
    let file = folder.write("deep/config", &text);
    let first = folder.write("first", &kubeconfig("b", "a"));
    let environment = folder.environment(&[first, file]);
    let user = selected(&place(None, None), &environment).config.auth_info;
    let expected = |name| Some(folder.path(name).display().to_string());
    assert_eq!(user.client_certificate, expected("deep/c.crt"));
    assert_eq!(user.client_key, expected("deep/../c.key"));
    assert_eq!(user.token_file, expected("deep/t"));
}

#[test]
fn without_a_cluster_there_is_a_reason() {
    let folder = Folder::new();
    let environment = folder.environment(&[]);
    let default = folder.path(".kube/config").display().to_string();
    assert!(nothing(&environment).contains(&format!("{default} does not exist")));
    let absent = folder.environment(&[folder.path("x"), folder.path("y")]);
    assert!(nothing(&absent).contains("y does not exist"));
    assert_eq!(nothing(&Environment::default()), "there is no kubeconfig");
    folder.write(".kube/config", &kubeconfig("a", ""));
    assert!(nothing(&environment).ends_with("has no current-context"));
    // An empty file is what `kubectl config unset` leaves.
    folder.write(".kube/config", "");
    assert!(nothing(&environment).ends_with("has no current-context"));
}

#[test]
fn who_names_a_cluster_gets_it_or_an_error() {
    let folder = Folder::new();
    let environment = folder.environment(&[]);
    let absent = folder.path("absent");
    let text = error(&place(Some(&absent), None), &environment);
    assert!(text.starts_with("cannot read the kubeconfig /"), "{text}");
    let text = error(&place(None, Some("prod")), &environment);
    assert!(text.contains("no cluster to ask"), "{text}");
    let file = folder.write("config", &kubeconfig("a", ""));
    let text = error(&place(Some(&file), None), &environment);
    assert!(text.contains("has no current-context"), "{text}");
    let text = error(&place(Some(&file), Some("prod")), &environment);
    assert!(text.contains("has no context \"prod\""), "{text}");
}

#[test]
fn a_broken_file_is_an_error_without_its_secrets() {
    let folder = Folder::new();
    let environment = folder.environment(&[]);
    let good = kubeconfig("a", "a");
    let cases = [
        ("users: [", "is not a kubeconfig"),
        ("\u{0}\u{1}", "is not a kubeconfig"),
        (
            &good.replace("cluster: a,", "cluster: b,"),
            "has no cluster \"b\"",
        ),
        (&good.replace("user: a}", "user: b}"), "has no user \"b\""),
        (
            &good.replace("https://a.example:6443", "a.example"),
            "not the address",
        ),
        (
            &good.replace("https://a.example:6443", "ftp://a"),
            "not the address",
        ),
        (
            &good.replace("{token: token-of-a}", "token-of-a"),
            "is not a kubeconfig",
        ),
        (
            &good.replace("{token: token-of-a}", "{token: {x: token-of-a}}"),
            "is not a kubeconfig",
        ),
        (
            &good.replace("{token:", "{as: root, token:"),
            "acts as another user",
        ),
        (
            &good.replace("{server:", "{certificate-authority-data: x!, server:"),
            "certificate-authority",
        ),
        (
            &good.replace("{server:", "{certificate-authority: nowhere, server:"),
            "certificate-authority",
        ),
    ];
    for (text, expected) in cases {
        folder.write(".kube/config", text);
        let error = error(&place(None, None), &environment);
        assert!(error.contains(expected), "{text}\n{error}");
        assert!(!error.contains("token-of"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn proxies_are_for_other_machines() {
    let folder = Folder::new();
    let environment = folder.environment(&[]);
    let proxy = "{proxy-url: 'http://proxy.example:3128', server:";
    let text = kubeconfig("a", "a").replace("{server:", proxy);
    folder.write(".kube/config", &text);
    let config = selected(&place(None, None), &environment).config;
    assert_eq!(config.proxy_url.unwrap().host(), Some("proxy.example"));
    // Whatever the environment of this test says.
    assert!(!wants_proxy(&"https://127.0.0.1:6443".parse().unwrap()));
    assert!(!wants_proxy(&"https://localhost:6443".parse().unwrap()));
}
