//! Objects in Kubernetes' protobuf, read into the slim types: half of the bytes of JSON, and less work for the server.
//!
//! The slim types name fields as JSON does. Tables ([`schema`]) say which number a field has in protobuf, so that one
//! definition of a type serves both encodings. Fields without a row are skipped.

mod schema;

use std::borrow::Cow;
use std::fmt;

use prost::bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};
use serde::de::value::{CowStrDeserializer, StrDeserializer};
use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use schema::{ENVELOPE, MessageField, Presence, Shape};
pub(super) use schema::{LIST, Message, NAMESPACE, NODE, POD, SERVICE, SLICE, STATUS, WATCH_EVENT};

/// First bytes of each object.
const MAGIC: &[u8] = b"k8s\0";

/// A failure to read protobuf.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Malformed(String);

impl de::Error for Malformed {
    fn custom<T: fmt::Display>(reason: T) -> Self {
        Self(reason.to_string())
    }
}

/// Returns the object in an envelope (`runtime.Unknown`).
pub(super) fn unwrap(bytes: &[u8]) -> Result<&[u8], Malformed> {
    #[derive(Deserialize)]
    struct Envelope<'a> {
        #[serde(borrow)]
        raw: &'a [u8],
    }
    let enveloped = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| Malformed("no object of Kubernetes".to_owned()))?;
    read::<Envelope<'_>>(&ENVELOPE, enveloped).map(|envelope| envelope.raw)
}

/// Reads a message.
pub(super) fn read<'de, T: Deserialize<'de>>(
    message: &'static Message,
    bytes: &'de [u8],
) -> Result<T, Malformed> {
    T::deserialize(Content {
        shape: Shape::Message(message),
        payload: Payload::Bytes(bytes),
    })
}

/// A field's content.
#[derive(Clone, Copy)]
enum Payload<'de> {
    Number(u64),
    Bytes(&'de [u8]),
}

/// Takes the number and the content of the next field; no content for types that Kubernetes does not use.
fn take<'de>(rest: &mut &'de [u8]) -> Result<(u32, Option<Payload<'de>>), Malformed> {
    let malformed = |error: prost::DecodeError| Malformed(error.to_string());
    let (tag, wire) = decode_key(rest).map_err(malformed)?;
    let content = match wire {
        WireType::Varint => Some(Payload::Number(decode_varint(rest).map_err(malformed)?)),
        WireType::LengthDelimited => {
            let length = decode_varint(rest).map_err(malformed)?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            Some(Payload::Bytes(split(rest, length)?))
        }
        WireType::ThirtyTwoBit => split(rest, 4).map(|_| None)?,
        WireType::SixtyFourBit => split(rest, 8).map(|_| None)?,
        WireType::StartGroup | WireType::EndGroup => return Err(Malformed("a group".to_owned())),
    };
    Ok((tag, content))
}

fn split<'de>(rest: &mut &'de [u8], length: usize) -> Result<&'de [u8], Malformed> {
    let taken = rest.split_off(..length);
    taken.ok_or_else(|| Malformed("the end is missing".to_owned()))
}

/// The fields of a message, as a map from names to contents.
struct MessageFields<'de> {
    message: &'static Message,
    rest: &'de [u8],
    next: Option<(&'static MessageField, Payload<'de>)>,
}

impl<'de> MapAccess<'de> for MessageFields<'de> {
    type Error = Malformed;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Malformed> {
        while self.rest.has_remaining() {
            let (tag, content) = take(&mut self.rest)?;
            let field = self.message.0.iter().find(|field| field.tag == tag);
            if let (Some(field), Some(content)) = (field, content)
                && !field.is_omitted(content)
            {
                self.next = Some((field, content));
                let name: StrDeserializer<'_, Malformed> = field.name.into_deserializer();
                return seed.deserialize(name).map(Some);
            }
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Malformed> {
        let next = self.next.take();
        let (field, first) = next.ok_or_else(|| Malformed("no field".to_owned()))?;
        if field.presence == Presence::Many {
            return seed.deserialize(Many {
                field,
                rest: &mut self.rest,
                next: Some(first),
            });
        }
        seed.deserialize(field.content(first))
    }
}

impl MessageField {
    fn content<'de>(&self, payload: Payload<'de>) -> Content<'de> {
        Content {
            shape: self.shape,
            payload,
        }
    }

    /// Returns whether JSON would omit the field.
    fn is_omitted(&self, content: Payload<'_>) -> bool {
        let is_empty = matches!(content, Payload::Number(0) | Payload::Bytes([]));
        self.presence == Presence::UnlessEmpty && is_empty
    }
}

/// A repeated field: its contents follow each other.
struct Many<'m, 'de> {
    field: &'static MessageField,
    rest: &'m mut &'de [u8],
    next: Option<Payload<'de>>,
}

impl<'de> Many<'_, 'de> {
    fn next(&mut self) -> Result<Option<Content<'de>>, Malformed> {
        if self.next.is_none() && self.rest.has_remaining() {
            let mut after = *self.rest;
            if let (tag, content @ Some(_)) = take(&mut after)?
                && tag == self.field.tag
            {
                (*self.rest, self.next) = (after, content);
            }
        }
        Ok(self.next.take().map(|payload| self.field.content(payload)))
    }
}

impl<'de> SeqAccess<'de> for Many<'_, 'de> {
    type Error = Malformed;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Malformed> {
        let next = self.next()?;
        next.map(|content| seed.deserialize(content)).transpose()
    }
}

/// Texts by names: a repeated message of a name and a text.
struct TextMap<'m, 'de> {
    entries: Many<'m, 'de>,
    text: Cow<'de, str>,
}

impl<'de> MapAccess<'de> for TextMap<'_, 'de> {
    type Error = Malformed;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Malformed> {
        let Some(entry) = self.entries.next()? else {
            return Ok(None);
        };
        let mut rest = entry.bytes()?;
        let (mut name, mut text) = (&[][..], &[][..]);
        while rest.has_remaining() {
            match take(&mut rest)? {
                (1, Some(Payload::Bytes(bytes))) => name = bytes,
                (2, Some(Payload::Bytes(bytes))) => text = bytes,
                _ => {}
            }
        }
        // The API server stores any bytes in annotations, and its JSON replaces those that are no UTF-8, too.
        self.text = String::from_utf8_lossy(text);
        let name: CowStrDeserializer<'_, Malformed> =
            String::from_utf8_lossy(name).into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Malformed> {
        let text: CowStrDeserializer<'_, Malformed> =
            std::mem::take(&mut self.text).into_deserializer();
        seed.deserialize(text)
    }
}

impl<'de> Deserializer<'de> for Many<'_, 'de> {
    type Error = Malformed;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        if matches!(self.field.shape, Shape::Entry) {
            let entries = self;
            return visitor.visit_map(TextMap {
                entries,
                text: Cow::Borrowed(""),
            });
        }
        visitor.visit_seq(self)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_some(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// A field's content and its meaning.
struct Content<'de> {
    shape: Shape,
    payload: Payload<'de>,
}

impl<'de> Content<'de> {
    fn bytes(&self) -> Result<&'de [u8], Malformed> {
        match self.payload {
            Payload::Bytes(bytes) => Ok(bytes),
            Payload::Number(_) => Err(Malformed("a number, where bytes are expected".to_owned())),
        }
    }

    fn number(&self) -> Result<i64, Malformed> {
        match self.payload {
            Payload::Number(number) => Ok(number.cast_signed()),
            Payload::Bytes(_) => Err(Malformed("bytes, where a number is expected".to_owned())),
        }
    }
}

impl<'de> Deserializer<'de> for Content<'de> {
    type Error = Malformed;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        match self.shape {
            Shape::Text => visitor.visit_borrowed_str(utf8(self.bytes()?)?),
            Shape::Number => visitor.visit_i64(self.number()?),
            Shape::Flag => visitor.visit_bool(self.number()? != 0),
            Shape::Bytes => visitor.visit_borrowed_bytes(self.bytes()?),
            Shape::Time => match time(self.bytes()?)? {
                Some(time) => visitor.visit_string(time),
                None => visitor.visit_none(),
            },
            Shape::NameOrNumber => name_or_number(self.bytes()?, visitor),
            Shape::Message(message) => visitor.visit_map(MessageFields {
                message,
                rest: self.bytes()?,
                next: None,
            }),
            Shape::Entry => Err(Malformed("one entry of a map".to_owned())),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        match (self.shape, self.payload) {
            // A time that is not set.
            (Shape::Time, Payload::Bytes([])) => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier
    }
}

fn utf8(bytes: &[u8]) -> Result<&str, Malformed> {
    std::str::from_utf8(bytes).map_err(|error| Malformed(error.to_string()))
}

/// Writes a time (`metav1.Time`) as JSON has it.
fn time(bytes: &[u8]) -> Result<Option<String>, Malformed> {
    #[derive(Deserialize)]
    struct Time {
        #[serde(default)]
        seconds: i64,
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    let time: Time = read(&schema::TIME, bytes)?;
    let time =
        jiff::Timestamp::from_second(time.seconds).map_err(|error| Malformed(error.to_string()))?;
    Ok(Some(time.to_string()))
}

/// Reads a name or a number (`intstr.IntOrString`).
fn name_or_number<'de, V: Visitor<'de>>(
    bytes: &'de [u8],
    visitor: V,
) -> Result<V::Value, Malformed> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    #[derive(Default)]
    struct IntOrString<'a> {
        r#type: i64,
        int_val: i64,
        #[serde(borrow)]
        str_val: &'a str,
    }
    let value: IntOrString<'de> = read(&schema::INT_OR_STRING, bytes)?;
    match value.r#type {
        0 => visitor.visit_i64(value.int_val),
        _ => visitor.visit_borrowed_str(value.str_val),
    }
}
