//! Settings that a control plane chooses.

use kplane_model::NodeName;
use tempfile::TempDir;

use super::*;

fn wish(backend: &str) -> pb::Settings {
    pb::Settings {
        backend: backend.to_owned(),
        ..pb::Settings::default()
    }
}

/// Returns a choice with a file in a folder.
fn choice(folder: &TempDir) -> Choice {
    let file = cache::settings_file(folder.path(), &NodeName::from("n1"));
    Choice {
        file: Some(file),
        ..Choice::none()
    }
}

#[test]
fn settings_go_over_the_wire_and_back() {
    let all = pb::Settings {
        backend: "iptables".to_owned(),
        iptables_layout: "compat".to_owned(),
        masquerade_bit: Some(0),
    };
    let settings = FleetSettings::try_from(&all).unwrap();
    assert_eq!(settings.backend, Some(Kind::Iptables));
    assert_eq!(pb::Settings::from(&settings), all);
    let none = FleetSettings::try_from(&pb::Settings::default()).unwrap();
    assert_eq!(none, FleetSettings::default());
}

#[test]
fn what_the_agent_does_not_know_is_refused_by_name() {
    let layout = pb::Settings {
        iptables_layout: "heap".to_owned(),
        ..pb::Settings::default()
    };
    let bit = pb::Settings {
        masquerade_bit: Some(32),
        ..pb::Settings::default()
    };
    for (wish, word) in [
        (wish("ebpf"), "ebpf"),
        (wish("noop"), "noop"),
        (layout, "heap"),
        (bit, "0 to 31"),
    ] {
        let reason = FleetSettings::try_from(&wish).unwrap_err();
        assert!(reason.contains(word), "{reason}");
    }
}

#[tokio::test]
async fn a_wish_is_heard_once_and_only_if_it_differs() {
    let choice = Choice::none();
    choice.hear(None);
    choice.hear(Some(&pb::Settings::default()));
    assert_eq!(*choice.wish.borrow(), None);
    choice.hear(Some(&wish("iptables")));
    assert_eq!(choice.wish().await, wish("iptables"));

    let next = choice.after(wish("iptables"));
    assert_eq!(next.in_force().backend, Some(Kind::Iptables));
    next.hear(Some(&wish("iptables")));
    assert_eq!(*next.wish.borrow(), None);
    next.hear(Some(&pb::Settings::default()));
    assert_eq!(next.wish().await, pb::Settings::default(), "the way back");
}

#[test]
fn a_wish_that_cannot_be_fulfilled_changes_nothing_and_is_not_tried_again() {
    let before = Choice::none().after(wish("iptables"));
    let unknown = before.after(wish("ebpf"));
    let broken = before.after(wish("ipvs")).instead(&before, "no IPVS here");
    for (choice, backend, reason) in [(unknown, "ebpf", "ebpf"), (broken, "ipvs", "no IPVS here")] {
        assert_eq!(choice.in_force(), before.in_force());
        let refusal = choice.refusal().unwrap();
        assert_eq!(refusal.settings, Some(wish(backend)));
        assert!(refusal.reason.contains(reason), "{refusal:?}");
        choice.hear(Some(&wish(backend)));
        assert_eq!(*choice.wish.borrow(), None);
        choice.hear(Some(&wish("nftables")));
        assert_eq!(*choice.wish.borrow(), Some(wish("nftables")));
    }
}

#[test]
fn a_file_keeps_the_settings_until_they_are_the_agents_own() {
    let folder = TempDir::new().unwrap();
    let chosen = choice(&folder).after(wish("iptables"));
    assert_eq!(FleetSettings::all_in(folder.path()), []);
    chosen.save();
    assert_eq!(FleetSettings::all_in(folder.path()), [*chosen.in_force()]);
    chosen.after(pb::Settings::default()).save();
    assert_eq!(FleetSettings::all_in(folder.path()), []);
    chosen.after(pb::Settings::default()).save();

    let file = chosen.file.clone().unwrap();
    for damage in ["", "{\"backend\":\"ebpf\"}", "{\"backends\":1}"] {
        std::fs::write(&file, damage).unwrap();
        FleetSettings::read(&file).unwrap_err();
    }
    // A cleanup leaves nothing that the next agent would begin with.
    assert_eq!(cache::Cache::forget(folder.path()).unwrap(), 1);
    assert!(!file.exists());
}
