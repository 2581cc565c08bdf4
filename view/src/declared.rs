//! Lists that methods of the API declare in their .proto files: what `kpctl get` asks for, and how it shows the answer.
//!
//! A method with the option `listing` is a kind of `kpctl get`. Its rows are the answer's first repeated field of messages
//! that have columns. Nothing else has to know the kind.

mod cell;
mod json;

use std::sync::LazyLock;

use kplane_proto::v1 as pb;
use prost_reflect::{
    DescriptorPool, DynamicMessage, ExtensionDescriptor, FieldDescriptor, Kind, MethodDescriptor,
    ReflectMessage as _, Value,
};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use self::cell::Cells;
use super::replicas::{MissingReplicaView, alone_text, missing_text};
use super::silent::AskedView;
use super::{API_VERSION, List, View};
use crate::style::{Canvas, Tone};
use crate::table::{Column, Table};
use crate::text::{Span, field, grouped, paragraph};
use crate::time::Time;
use crate::wire::FromWire as _;

/// The options that methods and fields have.
struct Options {
    listing: ExtensionDescriptor,
    argument: ExtensionDescriptor,
    column: ExtensionDescriptor,
    below: ExtensionDescriptor,
    format: ExtensionDescriptor,
    mood: ExtensionDescriptor,
    shown: ExtensionDescriptor,
}

/// All that is declared.
struct Declared {
    options: Options,
    listings: Vec<Listing>,
}

static DECLARED: LazyLock<Declared> = LazyLock::new(|| {
    // A test loads what the build has written.
    let pool = DescriptorPool::decode(pb::DECLARED).unwrap_or_default();
    read(&pool).unwrap_or_else(|missing| unreachable!("this build has no option {missing}"))
});

fn read(pool: &DescriptorPool) -> Result<Declared, &'static str> {
    let option = |name: &'static str| {
        let found = pool.get_extension_by_name(&format!("kplane.v1.{name}"));
        found.ok_or(name)
    };
    let options = Options {
        listing: option("listing")?,
        argument: option("argument")?,
        column: option("column")?,
        below: option("below")?,
        format: option("format")?,
        mood: option("mood")?,
        shown: option("shown")?,
    };
    let methods = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>());
    let listings = methods.filter_map(|method| Listing::of(&method, &options)).collect();
    Ok(Declared { options, listings })
}

/// Returns an option of a method or field, as a message.
fn option<T: prost::Message + Default>(
    options: &DynamicMessage,
    of: &ExtensionDescriptor,
) -> Option<T> {
    let is_there = options.has_extension(of);
    is_there
        .then(|| options.get_extension(of).as_message()?.transcode_to().ok())
        .flatten()
}

/// Returns an option of a field, as a text; empty = it has none.
fn text_option(options: &DynamicMessage, of: &ExtensionDescriptor) -> String {
    options.get_extension(of).as_str().unwrap_or_default().to_owned()
}

/// A kind of `kpctl get`.
#[derive(Clone, Debug)]
pub struct Listing {
    /// The method that returns it.
    pub method: MethodDescriptor,
    /// What the method declares.
    pub declared: pb::Listing,
    /// The options of the command.
    pub arguments: Vec<Argument>,
    rows: FieldDescriptor,
    columns: Vec<(FieldDescriptor, pb::Column)>,
}

/// An option of a command that asks.
#[derive(Clone, Debug)]
pub struct Argument {
    /// The request's field.
    pub field: FieldDescriptor,
    /// What the field declares.
    pub declared: pb::Argument,
}

impl Listing {
    /// Returns the field that says which nodes were asked; `None` = agents are not asked.
    pub fn asked(&self) -> Option<FieldDescriptor> {
        let is_it = |of: &FieldDescriptor| {
            of.kind().as_message().is_some_and(|message| message.name() == "NodesAsked")
        };
        self.method.output().fields().find(is_it)
    }

    fn of(method: &MethodDescriptor, options: &Options) -> Option<Self> {
        let declared = option(&method.options(), &options.listing)?;
        let (request, answer) = (method.input(), method.output());
        let arguments = request.fields().filter_map(|field| {
            let declared = option(&field.options(), &options.argument)?;
            Some(Argument { field, declared })
        });
        let mut lists = answer.fields().filter(FieldDescriptor::is_list);
        let (rows, columns) =
            lists.find_map(|list| Some((list.clone(), columns(&list, options)?)))?;
        Some(Self {
            declared,
            arguments: arguments.collect(),
            rows,
            columns,
            method: method.clone(),
        })
    }

    /// Returns all kinds.
    pub fn all() -> &'static [Self] {
        &DECLARED.listings
    }

    /// Returns the kind with a word.
    pub fn named(word: &str) -> Option<&'static Self> {
        Self::all().iter().find(|of| of.declared.words.iter().any(|own| own == word))
    }

    /// Returns the first word for the kind.
    pub fn name(&self) -> &str {
        self.declared.words.first().map_or("", String::as_str)
    }

    /// Returns whether the kind has all that it needs without a positional argument.
    pub fn is_of_all(&self) -> bool {
        self.arguments.iter().all(|argument| !argument.declared.positional)
    }
}

/// Returns the columns of a list's rows, in the order of their fields; `None` if it has none.
fn columns(
    list: &FieldDescriptor,
    options: &Options,
) -> Option<Vec<(FieldDescriptor, pb::Column)>> {
    let Kind::Message(row) = list.kind() else {
        return None;
    };
    let declared = |of: FieldDescriptor| {
        let column = option(&of.options(), &options.column)?;
        Some((of, column))
    };
    let columns: Vec<_> = row.fields().filter_map(declared).collect();
    (!columns.is_empty()).then_some(columns)
}

/// Returns the text of a field; `None` = the message has no such field, or it is empty.
fn text(of: &DynamicMessage, field: &str) -> Option<String> {
    let value = of.get_field_by_name(field)?;
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Returns the number in a field; 0 = the message has no such field.
fn number(of: &DynamicMessage, field: &str) -> u64 {
    of.get_field_by_name(field)
        .and_then(|value| as_number(&value))
        .unwrap_or_default()
}

fn as_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_u32().map(u64::from))
}

/// Returns the message in a field.
fn message<T: prost::Message + Default>(of: &DynamicMessage, field: &FieldDescriptor) -> T {
    let value = of.get_field(field);
    value
        .as_message()
        .and_then(|value| value.transcode_to().ok())
        .unwrap_or_default()
}

/// Returns the messages in a field.
fn messages<T: prost::Message + Default>(of: &DynamicMessage, field: &str) -> Vec<T> {
    let value = of.get_field_by_name(field);
    let list = value.as_deref().and_then(Value::as_list).unwrap_or_default();
    list.iter().filter_map(|each| each.as_message()?.transcode_to().ok()).collect()
}

/// A row of a list.
#[derive(Clone, Debug)]
pub struct ListedRow(DynamicMessage);

impl Serialize for ListedRow {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        json::Object(&self.0).serialize(to)
    }
}

/// The view of an answer of a method that lists.
#[derive(Clone, Debug)]
pub struct ListingView {
    listing: &'static Listing,
    /// The object that the question names, such as "shop/web".
    about: Option<String>,
    rows: Vec<ListedRow>,
    /// The answer without its rows.
    rest: DynamicMessage,
    /// `None` = no agent was asked.
    asked: Option<AskedView>,
    missing: Vec<MissingReplicaView>,
    /// Whether to say what is not in the rows.
    is_first: bool,
}

impl ListingView {
    /// Creates the view of an answer. `about` is the object that the question names, and an answer that only goes on does
    /// not repeat what the first one has said.
    pub fn new(
        listing: &'static Listing,
        about: Option<String>,
        mut answer: DynamicMessage,
        is_first: bool,
    ) -> Self {
        let rows = answer.get_field(&listing.rows).into_owned();
        answer.clear_field(&listing.rows);
        let of = |row: &Value| Some(ListedRow(row.as_message()?.clone()));
        Self {
            listing,
            about,
            rows: rows.as_list().unwrap_or_default().iter().filter_map(of).collect(),
            asked: listing.asked().map(|of| message::<pb::NodesAsked>(&answer, &of).into()),
            missing: Vec::from_wire(messages::<pb::MissingReplica>(&answer, "missing_replicas")),
            rest: answer,
            is_first,
        }
    }

    /// Returns whether all that were asked have answered.
    pub fn is_complete(&self) -> bool {
        match &self.asked {
            Some(asked) => asked.is_complete(),
            None => self.missing.is_empty(),
        }
    }

    /// Returns what a question after this answer has to name; `None` = there is nothing new.
    pub fn last(&self) -> Option<u64> {
        self.rows.last().map(|row| number(&row.0, "number"))
    }

    /// Returns the lines below the table.
    fn below(&self, canvas: &Canvas) -> String {
        let options = &DECLARED.options;
        let mut out = String::new();
        for of in self.rest.descriptor().fields() {
            let below = text_option(&of.options(), &options.below);
            let value = as_number(&self.rest.get_field(&of)).unwrap_or_default();
            if below.is_empty() || value == 0 {
                continue;
            }
            if of.name() == "unasked_replicas" {
                let others = u32::try_from(value).unwrap_or(u32::MAX);
                out.push_str(&alone_text(others, &below, canvas));
                continue;
            }
            let is_time = of.options().get_extension(&options.format).as_enum_number()
                == Some(pb::Format::Time.into());
            let (shown, tone) = match if is_time { Time::from_wire(value) } else { None } {
                Some(time) => (time.local(), Tone::Faint),
                None => (grouped(value), Tone::Warn),
            };
            let text = below.replace("{}", &shown);
            out.push_str(&paragraph(&Span::new(text, tone), canvas, 0));
        }
        out
    }

    fn table(&self, canvas: &Canvas) -> String {
        let newest = self.listing.declared.newest as usize;
        let rows: Vec<&ListedRow> = match newest {
            0 => self.rows.iter().collect(),
            most => self.rows.iter().rev().take(most).collect(),
        };
        let cells = Cells {
            now: Time::from_wire(number(&self.rest, "now_ms")),
        };
        let mut table = Table::new(&rows);
        let columns = &self.listing.columns;
        for (of, declared) in columns.iter().filter(|(_, declared)| !declared.note) {
            let title = declared.title.as_str();
            let mut column = if declared.wide { Column::wide(title) } else { Column::new(title) };
            if declared.least > 0 {
                column = column.elastic(declared.least as usize);
            }
            if let Ok(rank @ 1..) = u8::try_from(declared.rank) {
                column = column.optional(rank);
            }
            table = table.column(column, |row| cells.span(&row.0, of, declared));
        }
        let notes = |row: &&ListedRow| {
            columns
                .iter()
                .filter(|(_, declared)| declared.note)
                .filter_map(|(of, _)| text(&row.0, of.name()))
                .map(|text| Span::new(text, Tone::Warn))
                .collect()
        };
        let text = table.notes(notes).render(canvas);
        match self.rows.len() - rows.len() {
            0 => text,
            hidden => {
                let name = self.listing.name();
                let older = format!("{hidden} older ones: {} get {name} -o json", canvas.program);
                text + &paragraph(&Span::new(older, Tone::Faint), canvas, 0)
            }
        }
    }
}

impl Serialize for ListingView {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("apiVersion", API_VERSION)?;
        map.serialize_entry("kind", &self.listing.declared.kind)?;
        if let Some((namespace, name)) = self.about.as_deref().and_then(|of| of.split_once('/')) {
            map.serialize_entry("namespace", namespace)?;
            map.serialize_entry("name", name)?;
        }
        map.serialize_entry(self.listing.rows.json_name(), &self.rows)?;
        let rest = self.rest.descriptor();
        // The time of the answer is no part of it.
        let is_shown = |of: &FieldDescriptor| of.name() != "now_ms";
        for of in rest.fields().filter(|of| *of != self.listing.rows && is_shown(of)) {
            map.serialize_entry(json::name(&of), &json::Field(&self.rest, &of))?;
        }
        map.end()
    }
}

impl List for ListingView {
    type Item = ListedRow;

    fn items(&mut self) -> &mut Vec<ListedRow> {
        &mut self.rows
    }
}

impl View for ListingView {
    fn names(&self) -> Option<Vec<String>> {
        let is_name = |declared: &pb::Column| declared.format() == pb::Format::Reference;
        let (of, _) = self.listing.columns.iter().find(|(_, declared)| is_name(declared))?;
        Some(self.rows.iter().filter_map(|row| text(&row.0, of.name())).collect())
    }

    fn text(&self, canvas: &Canvas) -> String {
        let mut out = String::new();
        if let Some(about) = &self.about {
            out.push_str(&field("Service", &[Span::plain(about)], canvas));
        }
        if let Some(asked) = &self.asked {
            out.push_str(&field("Asked", &[Span::plain(asked.summary())], canvas));
        }
        if !out.is_empty() {
            out.push('\n');
        }
        if !self.rows.is_empty() {
            out.push_str(&self.table(canvas));
        } else if self.is_first {
            let none = Span::plain(&self.listing.declared.none);
            out.push_str(&paragraph(&none, canvas, 0));
        }
        if self.is_first {
            out.push_str(&self.below(canvas));
        }
        out + &match &self.asked {
            Some(asked) => asked.text(canvas),
            None => missing_text(&self.missing, canvas),
        }
    }
}
