//! Compatibility with the last release: no method, message, field or enum value that it has may go or change. status.proto
//! has the rules.
//!
//! `released/VERSION.bin` has the descriptors of a release. Add the file with the release, and never change one:
//! `KPLANE_WRITE_RELEASED=1 cargo test -p kplane-proto released` writes the one of the present version if it is
//! missing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    ServiceDescriptorProto,
};

use crate::v1::DESCRIPTORS;

/// The facts that must not change, by the names of the things that they are about.
type Facts = BTreeMap<String, String>;

/// Returns what clients depend on.
fn facts(set: &FileDescriptorSet) -> Facts {
    let mut facts = Facts::new();
    for file in set.file.iter().filter(|file| file.package().starts_with("kplane.")) {
        let package = file.package();
        for service in &file.service {
            service_facts(
                &format!("{package}.{}", service.name()),
                service,
                &mut facts,
            );
        }
        for message in &file.message_type {
            message_facts(
                &format!("{package}.{}", message.name()),
                message,
                &mut facts,
            );
        }
        for of in &file.enum_type {
            enum_facts(&format!("{package}.{}", of.name()), of, &mut facts);
        }
    }
    facts
}

fn service_facts(name: &str, service: &ServiceDescriptorProto, facts: &mut Facts) {
    for method in &service.method {
        let [asks, answers] = [method.client_streaming(), method.server_streaming()];
        let stream = |is: bool| if is { "stream " } else { "" };
        let fact = format!(
            "takes {}{}, returns {}{}",
            stream(asks),
            method.input_type(),
            stream(answers),
            method.output_type()
        );
        facts.insert(format!("method {name}.{}", method.name()), fact);
    }
}

fn message_facts(name: &str, message: &DescriptorProto, facts: &mut Facts) {
    facts.insert(format!("message {name}"), "exists".to_owned());
    for field in &message.field {
        // Binary clients know the number, and those of JSON the name.
        facts.insert(
            format!("field {} of {name}", field.number()),
            field_fact(field, message),
        );
    }
    for nested in &message.nested_type {
        message_facts(&format!("{name}.{}", nested.name()), nested, facts);
    }
    for nested in &message.enum_type {
        enum_facts(&format!("{name}.{}", nested.name()), nested, facts);
    }
}

fn field_fact(field: &FieldDescriptorProto, message: &DescriptorProto) -> String {
    let ty = match field.r#type() {
        Type::Message | Type::Enum => field.type_name().to_owned(),
        scalar => format!("{scalar:?}"),
    };
    let oneof = match (field.proto3_optional(), field.oneof_index) {
        (true, _) => ", optional".to_owned(),
        (false, Some(index)) => {
            let index = usize::try_from(index).unwrap();
            format!(", in oneof {}", message.oneof_decl[index].name())
        }
        (false, None) => String::new(),
    };
    format!("{}, {:?} {ty}{oneof}", field.name(), field.label())
}

fn enum_facts(name: &str, of: &EnumDescriptorProto, facts: &mut Facts) {
    for value in &of.value {
        let fact = value.name().to_owned();
        facts.insert(format!("value {} of {name}", value.number()), fact);
    }
}

/// Returns what the newer one breaks.
fn breaks(released: &Facts, now: &Facts) -> Vec<String> {
    released
        .iter()
        .filter(|(name, fact)| now.get(*name) != Some(*fact))
        .map(|(name, fact)| match now.get(name) {
            Some(now) => format!("{name}: was \"{fact}\", is \"{now}\""),
            None => format!("{name}: was \"{fact}\", is gone"),
        })
        .collect()
}

fn present() -> FileDescriptorSet {
    FileDescriptorSet::decode(DESCRIPTORS).unwrap()
}

#[test]
fn nothing_breaks_clients_of_a_release() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/released");
    let own = folder.join(concat!(env!("CARGO_PKG_VERSION"), ".bin"));
    if !own.exists() && std::env::var_os("KPLANE_WRITE_RELEASED").is_some() {
        let mut set = present();
        set.file.iter_mut().for_each(|file| file.source_code_info = None);
        fs::write(&own, set.encode_to_vec()).unwrap();
    }
    let now = facts(&present());
    let mut releases = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        let released = FileDescriptorSet::decode(&*fs::read(&file).unwrap()).unwrap();
        let broken = breaks(&facts(&released), &now);
        assert!(
            broken.is_empty(),
            "kplane.v1 is not what it was in {}:\n{}",
            file.display(),
            broken.join("\n")
        );
        releases += 1;
    }
    assert!(releases > 0);
}

/// Returns what a change of the messages breaks.
fn broken_by(change: impl FnOnce(&mut FileDescriptorSet)) -> Vec<String> {
    let mut changed = present();
    change(&mut changed);
    breaks(&facts(&present()), &facts(&changed))
}

fn message<'a>(set: &'a mut FileDescriptorSet, name: &str) -> &'a mut DescriptorProto {
    set.file
        .iter_mut()
        .flat_map(|file| &mut file.message_type)
        .find(|message| message.name() == name)
        .unwrap()
}

#[test]
fn each_kind_of_break_is_found() {
    let field = |set: &mut FileDescriptorSet, change: fn(&mut FieldDescriptorProto)| {
        change(&mut message(set, "NodeStatus").field[0]);
    };
    let one = |broken: Vec<String>, expected: &str| {
        assert_eq!(broken, [expected]);
    };
    one(
        broken_by(|set| drop(message(set, "NodeStatus").field.remove(0))),
        "field 1 of kplane.v1.NodeStatus: was \"name, Optional String\", is gone",
    );
    one(
        broken_by(|set| field(set, |field| field.number = Some(99))),
        "field 1 of kplane.v1.NodeStatus: was \"name, Optional String\", is gone",
    );
    one(
        broken_by(|set| field(set, |field| field.name = Some("node".to_owned()))),
        "field 1 of kplane.v1.NodeStatus: was \"name, Optional String\", is \"node, Optional String\"",
    );
    one(
        broken_by(|set| field(set, |field| field.set_type(Type::Bytes))),
        "field 1 of kplane.v1.NodeStatus: was \"name, Optional String\", is \"name, Optional Bytes\"",
    );
    one(
        broken_by(|set| {
            let repeated = prost_types::field_descriptor_proto::Label::Repeated;
            message(set, "NodeStatus").field[0].set_label(repeated);
        }),
        "field 1 of kplane.v1.NodeStatus: was \"name, Optional String\", is \"name, Repeated String\"",
    );
    let values = broken_by(|set| {
        let enums = set.file.iter_mut().flat_map(|file| &mut file.enum_type);
        let mut states = enums.filter(|of| of.name() == "NodeState");
        states.next().unwrap().value.swap_remove(1);
    });
    one(
        values,
        "value 1 of kplane.v1.NodeState: was \"NODE_STATE_NO_AGENT\", is gone",
    );
    let methods = broken_by(|set| {
        let services = set.file.iter_mut().flat_map(|file| &mut file.service);
        let mut status = services.filter(|of| of.name() == "StatusService");
        status.next().unwrap().method[0].server_streaming = Some(true);
    });
    assert_eq!(methods.len(), 1);
    assert!(methods[0].starts_with("method kplane.v1.StatusService.GetFleet: "));
}

#[test]
fn additions_break_nothing() {
    let added = broken_by(|set| {
        let node = message(set, "NodeStatus");
        let mut field = node.field[0].clone();
        field.number = Some(99);
        field.name = Some("more".to_owned());
        node.field.push(field);
        let mut more = node.clone();
        more.name = Some("More".to_owned());
        set.file.last_mut().unwrap().message_type.push(more);
    });
    assert_eq!(added, Vec::<String>::new());
}
