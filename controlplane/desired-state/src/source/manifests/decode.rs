//! Decoding of a tree of nodes into a typed object; errors name the field, the line and the
//! expected value.
//!
//! This is a [`serde::Deserializer`], so the types in [`crate::k8s`] stay the only description of
//! the fields. As in Kubernetes, `null` is the same as absent, and types are not converted.

use std::fmt;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, Expected, MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

use super::tree::{Value, YamlNode};

/// Maximum number of characters of a text in an error.
const SHOWN_CHARS: usize = 40;

/// Message about a missing field.
const MISSING: &str = "is missing";

/// The error for a value of the wrong type, or for a missing field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DecodeError {
    /// Line of the value in the parsed text; 0 when unknown.
    pub(super) line: usize,
    /// Path to the value, innermost part first, each part as it is printed.
    path: Vec<String>,
    message: String,
}

impl fmt::Display for DecodeError {
    /// Prints text such as `spec.ports[0].port must be a whole number, not the text "http"`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path: String = self.path.iter().rev().map(String::as_str).collect();
        match path.trim_start_matches('.') {
            "" => f.write_str(&self.message),
            path => write!(f, "{path} {}", self.message),
        }
    }
}

impl std::error::Error for DecodeError {}

impl serde::de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self {
            line: 0,
            path: Vec::new(),
            message: message.to_string(),
        }
    }

    fn missing_field(field: &'static str) -> Self {
        let mut error = Self::custom(MISSING);
        error.path.push(format!(".{field}"));
        error
    }

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(format_args!("must be {expected}"))
    }
}

impl DecodeError {
    /// Returns advice for the operator.
    pub(super) fn cure(&self) -> &'static str {
        if self.message == MISSING { "add it" } else { "correct it" }
    }

    fn inside(mut self, line: usize, part: impl FnOnce() -> String) -> Self {
        if self.line == 0 {
            self.line = line;
        }
        self.path.push(part());
        self
    }
}

/// Decodes a `T` from a tree.
pub(super) fn decode<'de, T: Deserialize<'de>>(node: &'de YamlNode) -> Result<T, DecodeError> {
    T::deserialize(node)
}

impl YamlNode {
    fn expected(&self, what: &str) -> DecodeError {
        let found = match &self.value {
            Value::Null => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Whole(value) => format!("the number {value}"),
            Value::Decimal(value) => format!("the number {value:?}"),
            Value::Text(text) if text.chars().nth(SHOWN_CHARS).is_some() => {
                let shown: String = text.chars().take(SHOWN_CHARS).collect();
                format!("the text {shown:?}...")
            }
            Value::Text(text) => format!("the text {text:?}"),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        };
        DecodeError {
            line: self.line,
            path: Vec::new(),
            message: format!("must be {what}, not {found}"),
        }
    }
}

impl<'de> Deserializer<'de> for &'de YamlNode {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Whole(value) => visitor.visit_i64(*value),
            Value::Decimal(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::List(_) => self.deserialize_seq(visitor),
            Value::Map(_) => self.deserialize_map(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Bool(value) => visitor.visit_bool(value),
            _ => Err(self.expected("true or false")),
        }
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Whole(value) => visitor.visit_i64(value),
            _ => Err(self.expected("a whole number")),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::Bool(_) | Value::Whole(_) | Value::Decimal(_) => {
                Err(self.expected("text (in quotes)"))
            }
            _ => Err(self.expected("text")),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::List(list) => visitor.visit_seq(Items {
                items: list.iter(),
                index: 0,
            }),
            _ => Err(self.expected("a list")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.value {
            Value::Map(map) => visitor.visit_map(Fields {
                fields: map.iter(),
                current: None,
            }),
            _ => Err(self.expected("a mapping")),
        }
        .map_err(|mut error| {
            if error.line == 0 {
                error.line = self.line;
            }
            error
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.deserialize_map(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct tuple
        tuple_struct enum identifier
    }
}

struct Items<'de> {
    items: std::slice::Iter<'de, YamlNode>,
    index: usize,
}

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        let Some(node) = self.items.next() else {
            return Ok(None);
        };
        let index = self.index;
        self.index += 1;
        let value = seed.deserialize(node);
        value
            .map(Some)
            .map_err(|error| error.inside(node.line, || format!("[{index}]")))
    }
}

struct Fields<'de> {
    fields: std::collections::btree_map::Iter<'de, String, YamlNode>,
    current: Option<(&'de String, &'de YamlNode)>,
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, DecodeError> {
        self.current = self.fields.find(|(_, node)| node.value != Value::Null);
        let Some((key, _)) = self.current else {
            return Ok(None);
        };
        seed.deserialize(StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<T::Value, DecodeError> {
        let Some((key, node)) = self.current.take() else {
            return Err(serde::de::Error::custom("is read twice"));
        };
        let value = seed.deserialize(node);
        value.map_err(|error| error.inside(node.line, || format!(".{key}")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::parse_yaml;
    use super::*;
    use crate::k8s::{EndpointSlice, Service};

    fn error<T: for<'de> Deserialize<'de>>(text: &str) -> String {
        match decode::<T>(&parse_yaml(text).unwrap()) {
            Ok(_) => "no error".to_owned(),
            Err(error) => format!("line {}: {error}", error.line),
        }
    }

    #[test]
    fn errors_name_the_field_and_the_line() {
        for (text, expected) in [
            (
                "metadata: {name: x}\nspec:\n  ports:\n  - port: 80\n  - port: http\n",
                "line 5: spec.ports[1].port must be a whole number, not the text \"http\"",
            ),
            (
                "metadata: {name: x}\nspec:\n  ports:\n  - port: 080.5\n",
                "line 4: spec.ports[0].port must be a whole number, not the number 80.5",
            ),
            (
                "metadata: {name: x}\nspec: [a]\n",
                "line 2: spec must be a mapping, not a list",
            ),
            (
                "metadata:\n  name: x\n  labels:\n    version: 1.10\n",
                "line 4: metadata.labels.version must be text (in quotes), not the number 1.1",
            ),
            (
                "metadata:\n  name: x\nspec:\n  externalIPs: 1.2.3.4\n",
                "line 4: spec.externalIPs must be a list, not the text \"1.2.3.4\"",
            ),
            ("spec: {}\n", "line 1: metadata is missing"),
            (
                "metadata:\n  labels: {}\nspec: {}\n",
                "line 2: metadata.name is missing",
            ),
            (
                "metadata: {name: {}}\n",
                "line 1: metadata.name must be text, not a mapping",
            ),
            (
                "just text",
                "line 1: must be a mapping, not the text \"just text\"",
            ),
        ] {
            assert_eq!(error::<Service>(text), expected, "{text}");
        }
        assert_eq!(
            error::<EndpointSlice>(
                "metadata: {name: x}\naddressType: IPv4\nendpoints:\n- conditions: {ready: yes}\n"
            ),
            "line 4: endpoints[0].conditions.ready must be true or false, not the text \"yes\""
        );
    }

    #[test]
    fn null_is_absent() {
        let text = "metadata: {name: x, labels: null}\nspec:\n  ports: null\nstatus: null\n";
        assert_eq!(error::<Service>(text), "no error");
    }
}
