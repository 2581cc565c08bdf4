//! docs/api.md: written from the .proto files, and compared with them.
//!
//! `KPLANE_WRITE=1 cargo test -p kplane-proto api_page` writes the page.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    FileDescriptorSet, ServiceDescriptorProto,
};

use crate::right_of;
use crate::v1::DESCRIPTORS;

/// The services for tools. The rest is between kplane's own programs.
const PUBLIC: [&str; 3] = ["StatusService", "DesiredStateService", "RecorderService"];

const HEAD: &str = "\
# API

This page is written from the comments in [the .proto files](https://github.com/kplane/kplane/blob/main/proto/proto/kplane/v1):
`KPLANE_WRITE=1 cargo test -p kplane-proto api_page` writes it anew, and the same test fails if it is out of date.

These services are on the status port of the control plane (7466), behind the rights of [security.md](security.md#rights).
[tools.md](tools.md) says how to connect, and has clients in Python and Go. The port also has gRPC reflection (v1 and
v1alpha), and `grpc.health.v1.Health`, which knows the services below by name. Answers are compressed with gzip for clients
that accept it.

    grpcurl -plaintext 127.0.0.1:7466 list
    grpcurl -plaintext -d '{\"page_size\": 100}' 127.0.0.1:7466 kplane.v1.StatusService/ListServices
    grpcurl -plaintext -d '{\"service\": \"kplane.v1.StatusService\"}' 127.0.0.1:7466 grpc.health.v1.Health/Check

**Lists come in pages**, so that no answer is larger than 4 MiB, the usual limit of clients. Repeat the request with the
`next_page_token` of the answer as `page_token` until it is empty.

";

/// A message or an enum, with its comment and those of its fields or values.
enum Kind<'a> {
    Message(&'a DescriptorProto),
    Enum(&'a EnumDescriptorProto),
}

struct Item<'a> {
    kind: Kind<'a>,
    comments: Comments<'a>,
}

/// The comments below one place of a file.
#[derive(Clone)]
struct Comments<'a> {
    file: &'a FileDescriptorProto,
    path: Vec<i32>,
}

impl Comments<'_> {
    /// Returns the comment at a place below this one.
    fn at(&self, below: &[i32]) -> String {
        let path = [&self.path[..], below].concat();
        let places = self.file.source_code_info.iter().flat_map(|of| &of.location);
        let mut found = places.filter(|place| place.path == path);
        let comment = found.next().map_or("", |place| place.leading_comments());
        comment
            .lines()
            .map(str::trim_end)
            .map(|line| line.strip_prefix(' ').unwrap_or(line))
            .collect::<Vec<_>>()
            .join("\n")
            .trim()
            .to_owned()
    }

    fn below(&self, more: &[i32]) -> Self {
        let path = [&self.path[..], more].concat();
        Self {
            path,
            ..self.clone()
        }
    }
}

fn index(n: usize) -> i32 {
    n.try_into().unwrap()
}

/// Collects the messages and enums of a message.
fn collect<'a>(
    name: &str,
    message: &'a DescriptorProto,
    comments: &Comments<'a>,
    items: &mut BTreeMap<String, Item<'a>>,
) {
    for (n, nested) in message.nested_type.iter().enumerate() {
        let name = format!("{name}.{}", nested.name());
        collect(&name, nested, &comments.below(&[3, index(n)]), items);
    }
    for (n, nested) in message.enum_type.iter().enumerate() {
        let item = Item {
            kind: Kind::Enum(nested),
            comments: comments.below(&[4, index(n)]),
        };
        items.insert(format!("{name}.{}", nested.name()), item);
    }
    let item = Item {
        kind: Kind::Message(message),
        comments: comments.clone(),
    };
    items.insert(name.to_owned(), item);
}

fn items(set: &FileDescriptorSet) -> BTreeMap<String, Item<'_>> {
    let mut items = BTreeMap::new();
    for file in &set.file {
        let root = Comments {
            file,
            path: Vec::new(),
        };
        let package = file.package();
        for (n, message) in file.message_type.iter().enumerate() {
            let name = format!(".{package}.{}", message.name());
            collect(&name, message, &root.below(&[4, index(n)]), &mut items);
        }
        for (n, of) in file.enum_type.iter().enumerate() {
            let item = Item {
                kind: Kind::Enum(of),
                comments: root.below(&[5, index(n)]),
            };
            items.insert(format!(".{package}.{}", of.name()), item);
        }
    }
    items
}

/// Returns the short name of a type, and its place on the page.
fn short(name: &str) -> &str {
    name.strip_prefix(".kplane.v1.").unwrap_or(name)
}

fn link(name: &str) -> String {
    let short = short(name);
    format!("[{short}](#{})", short.to_lowercase().replace('.', ""))
}

/// Returns a comment for a cell of a table.
fn cell(comment: &str) -> String {
    comment.replace('\n', " ").replace('|', "\\|")
}

fn field_type(field: &FieldDescriptorProto) -> String {
    let of = match field.r#type() {
        Type::Message | Type::Enum => link(field.type_name()),
        scalar => format!("{scalar:?}").to_lowercase(),
    };
    match (field.label(), field.proto3_optional()) {
        (Label::Repeated, _) => format!("repeated {of}"),
        (_, true) => format!("optional {of}"),
        _ => of,
    }
}

fn service_text(service: &ServiceDescriptorProto, comments: &Comments<'_>) -> String {
    let mut out = format!("## {}\n\n{}\n\n", service.name(), comments.at(&[]));
    for (n, method) in service.method.iter().enumerate() {
        let stream = if method.server_streaming() { "stream of " } else { "" };
        out.push_str(&format!(
            "### {}\n\n{} -> {stream}{}\n\n{}\n\nRight: [{}](#right)\n\n",
            method.name(),
            link(method.input_type()),
            link(method.output_type()),
            comments.at(&[2, index(n)]),
            right_of(&format!("/kplane.v1.{}/{}", service.name(), method.name()))
                .unwrap()
                .as_str_name(),
        ));
    }
    out
}

impl Item<'_> {
    fn text(&self, name: &str) -> String {
        let comment = match self.comments.at(&[]) {
            comment if comment.is_empty() => comment,
            comment => format!("{comment}\n\n"),
        };
        format!("### {}\n\n{comment}{}\n", short(name), self.table())
    }

    fn table(&self) -> String {
        match &self.kind {
            Kind::Message(message) if message.field.is_empty() => "No fields.\n".to_owned(),
            Kind::Message(message) => {
                let rows: String = message
                    .field
                    .iter()
                    .enumerate()
                    .map(|(n, field)| {
                        let oneof = match (field.proto3_optional(), field.oneof_index) {
                            (false, Some(_)) => "One of these. ",
                            _ => "",
                        };
                        let comment = cell(&self.comments.at(&[2, index(n)]));
                        let (name, number) = (field.name(), field.number());
                        let text = format!("{oneof}{comment}");
                        let text = text.trim();
                        format!("| {number} | `{name}` | {} | {text} |\n", field_type(field))
                    })
                    .collect();
                format!("| number | field | type | meaning |\n|---|---|---|---|\n{rows}")
            }
            Kind::Enum(of) => {
                let rows: String = of
                    .value
                    .iter()
                    .enumerate()
                    .map(|(n, value)| {
                        let comment = cell(&self.comments.at(&[2, index(n)]));
                        format!("| {} | `{}` | {comment} |\n", value.number(), value.name())
                    })
                    .collect();
                format!("| number | value | meaning |\n|---|---|---|\n{rows}")
            }
        }
    }

    /// Returns the types of its fields.
    fn uses(&self) -> impl Iterator<Item = &str> {
        let fields: &[FieldDescriptorProto] = match &self.kind {
            Kind::Message(message) => &message.field,
            Kind::Enum(_) => &[],
        };
        fields
            .iter()
            .map(FieldDescriptorProto::type_name)
            .filter(|name| !name.is_empty())
    }
}

fn page(set: &FileDescriptorSet) -> String {
    let items = items(set);
    let mut out = HEAD.to_owned();
    let mut wanted = VecDeque::from([".kplane.v1.Right"]);
    for name in PUBLIC {
        let mut services = set.file.iter().flat_map(|file| {
            file.service.iter().enumerate().map(move |(n, service)| (file, n, service))
        });
        let (file, n, service) = services.find(|(_, _, of)| of.name() == name).unwrap();
        let path = vec![6, index(n)];
        out.push_str(&service_text(service, &Comments { file, path }));
        for method in &service.method {
            wanted.extend([method.input_type(), method.output_type()]);
        }
    }
    out.push_str("## Messages\n\n");
    let mut seen = BTreeSet::new();
    while let Some(name) = wanted.pop_front() {
        if let Some(item) = items.get(name)
            && seen.insert(name.to_owned())
        {
            wanted.extend(item.uses());
        }
    }
    for name in &seen {
        out.push_str(&items[name].text(name));
        out.push('\n');
    }
    // One empty line between parts, and none at the end.
    while out.contains("\n\n\n") {
        out = out.replace("\n\n\n", "\n\n");
    }
    out.trim_end().to_owned() + "\n"
}

/// Reflection on the status port lists what tools can use, and nothing else.
#[test]
fn services_of_agents_and_replicas_are_not_described() {
    let described = crate::public_descriptors().unwrap();
    let set = FileDescriptorSet::decode(&*described).unwrap();
    let services = set.file.iter().flat_map(|file| &file.service);
    let names: BTreeSet<&str> = services.map(ServiceDescriptorProto::name).collect();
    assert_eq!(names, BTreeSet::from(PUBLIC));
}

#[test]
fn the_page_says_what_the_files_say() {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let page = page(&set);
    assert!(page.contains("| `next_page_token` | string | The `page_token` for the next nodes"));
    let unexplained = page.lines().filter(|line| line.ends_with("|  |"));
    assert_eq!(
        unexplained.collect::<Vec<_>>(),
        [""; 0],
        "a comment is missing in a .proto file"
    );
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md");
    if std::env::var_os("KPLANE_WRITE").is_some() {
        fs::write(&file, &page).unwrap();
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    let differ = written.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(
        written == page,
        "docs/api.md is out of date: KPLANE_WRITE=1 cargo test -p kplane-proto api_page; {differ:?}"
    );
}
