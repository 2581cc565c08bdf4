//! Messages as JSON, by their descriptors.
//!
//! Names of fields are those of the .proto files in camelCase, or their `json_name`. As in all of kpctl's JSON every field is
//! always there, what is not known is `null`, numbers are numbers, times are RFC 3339, and values of enums have no prefix.

use kplane_proto::v1 as pb;
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, ReflectMessage as _, Value};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::cell::shown;
use super::{DECLARED, as_number, option};
use crate::time::Time;

/// A message.
pub(super) struct Object<'a>(pub(super) &'a DynamicMessage);

/// A field of a message.
pub(super) struct Field<'a>(
    pub(super) &'a DynamicMessage,
    pub(super) &'a FieldDescriptor,
);

/// A value of a field, or one of several.
struct One<'a>(&'a Value, &'a FieldDescriptor);

/// Returns the name of a field.
pub(super) fn name(of: &FieldDescriptor) -> &str {
    of.json_name()
}

impl Serialize for Object<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        for of in self.0.descriptor().fields() {
            map.serialize_entry(name(&of), &Field(self.0, &of))?;
        }
        map.end()
    }
}

impl Serialize for Field<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self(message, of) = self;
        if of.supports_presence() && !message.has_field(of) {
            return to.serialize_none();
        }
        match &*message.get_field(of) {
            Value::List(list) => to.collect_seq(list.iter().map(|value| One(value, of))),
            value => One(value, of).serialize(to),
        }
    }
}

impl Serialize for One<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self(value, of) = self;
        match (value, of.kind()) {
            (Value::String(text), _) if text.is_empty() => to.serialize_none(),
            (Value::String(text), _) => to.serialize_str(text),
            (Value::Bool(is), _) => to.serialize_bool(*is),
            (Value::EnumNumber(number), Kind::Enum(of)) => to.serialize_str(&shown(&of, *number)),
            (Value::Message(message), _) => Object(message).serialize(to),
            (value, _) => match as_number(value) {
                Some(ms) if is_time(of) => Time::from_wire(ms).serialize(to),
                Some(number) => to.serialize_u64(number),
                None => to.serialize_none(),
            },
        }
    }
}

/// Returns whether a field is a time in milliseconds since 1970.
fn is_time(of: &FieldDescriptor) -> bool {
    let options = of.options();
    let column: Option<pb::Column> = option(&options, &DECLARED.options.column);
    let own = options.get_extension(&DECLARED.options.format).as_enum_number();
    let times = [pb::Format::Time, pb::Format::Age];
    let format = column.map_or(own.unwrap_or_default(), |column| column.format);
    times.into_iter().any(|time| i32::from(time) == format)
}
