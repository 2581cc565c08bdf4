//! The cells of a table whose columns are declared.

use std::time::Duration;

use kplane_proto::v1::{self as pb, Format, Mood};
use prost_reflect::{DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, Value};

use super::{DECLARED, as_number, text, text_option};
use crate::style::Tone;
use crate::text::{Span, grouped};
use crate::time::{Time, human};

/// What cells refer to.
pub(super) struct Cells {
    /// The time of the answer.
    pub(super) now: Option<Time>,
}

impl Cells {
    /// Returns the cell of a field.
    pub(super) fn span(
        &self,
        row: &DynamicMessage,
        of: &FieldDescriptor,
        column: &pb::Column,
    ) -> Span {
        if of.supports_presence() && !row.has_field(of) {
            return Span::none();
        }
        let value = row.get_field(of);
        if !column.namespace.is_empty() {
            let name = value.as_str().unwrap_or_default();
            return match text(row, &column.namespace) {
                Some(namespace) if !name.is_empty() => Span::plain(format!("{namespace}/{name}")),
                _ => Span::plain(name),
            };
        }
        match &*value {
            Value::List(list) => {
                let each = list.iter().map(|one| self.value(one, of, column).text);
                Span::plain(each.collect::<Vec<_>>().join(", "))
            }
            one => self.value(one, of, column),
        }
    }

    fn value(&self, value: &Value, of: &FieldDescriptor, column: &pb::Column) -> Span {
        match (value, of.kind()) {
            (Value::String(text), _) => Span::plain(text),
            (Value::Bool(is), _) => Span::plain(if *is { "yes" } else { "" }),
            (Value::EnumNumber(number), Kind::Enum(of)) => {
                Span::new(shown(&of, *number), tone(&of, *number))
            }
            (Value::Message(message), _) => Span::plain(port(message)),
            (value, _) => as_number(value)
                .map_or_else(Span::none, |number| self.number(number, column.format())),
        }
    }

    fn number(&self, number: u64, format: Format) -> Span {
        match format {
            Format::Number => Span::plain(number.to_string()),
            Format::Seconds => Span::plain(human(Duration::from_secs(number))),
            Format::Milliseconds => Span::plain(human(Duration::from_millis(number))),
            Format::Time => {
                Time::from_wire(number).map_or_else(Span::none, |at| Span::plain(at.local()))
            }
            Format::Age => match (Time::from_wire(number), self.now) {
                (Some(at), Some(now)) => Span::plain(at.age_text(now)),
                _ => Span::none(),
            },
            Format::Unspecified | Format::Reference => Span::plain(grouped(number)),
        }
    }
}

/// Returns a ServicePort without its Service, such as `http/TCP`.
fn port(key: &DynamicMessage) -> String {
    let Ok(key) = key.transcode_to::<pb::ServiceKey>() else {
        return String::new();
    };
    format!("{}/{}", key.port_name, crate::protocol(key.protocol()))
}

/// Returns how texts and JSON write a value of an enum; `Unknown` for one that is not specified, or of a newer server.
pub(super) fn shown(of: &EnumDescriptor, number: i32) -> String {
    let value = match of.get_value(number) {
        Some(value) if number != 0 => value,
        _ => return "Unknown".to_owned(),
    };
    let shown = text_option(&value.options(), &DECLARED.options.shown);
    if !shown.is_empty() {
        return shown;
    }
    let prefix = of.get_value(0).map(|zero| zero.name().replace("UNSPECIFIED", ""));
    let name = value.name().strip_prefix(prefix.unwrap_or_default().as_str());
    let words = name.unwrap_or(value.name()).split('_');
    words
        .map(|word| {
            let (first, rest) = word.split_at(word.len().min(1));
            format!("{first}{}", rest.to_ascii_lowercase())
        })
        .collect()
}

fn tone(of: &EnumDescriptor, number: i32) -> Tone {
    let value = of.get_value(number);
    let mood = value.and_then(|value| {
        let mood = value.options().get_extension(&DECLARED.options.mood).as_enum_number();
        Mood::try_from(mood?).ok()
    });
    match mood.unwrap_or_default() {
        Mood::Good => Tone::Good,
        Mood::Warning => Tone::Warn,
        Mood::Bad => Tone::Bad,
        Mood::Unspecified => Tone::Plain,
    }
}
