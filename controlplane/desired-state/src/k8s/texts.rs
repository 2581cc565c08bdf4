//! Texts of objects, read without a copy of what is not kept.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Labels or annotations.
pub type Texts = BTreeMap<Arc<str>, Arc<str>>;

/// Reads a text from where it stands, without a copy of it.
struct InPlace<F>(F);

impl<'de, T, F: FnOnce(&str) -> T> DeserializeSeed<'de> for InPlace<F> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<T, D::Error> {
        from.deserialize_str(self)
    }
}

impl<T, F: FnOnce(&str) -> T> Visitor<'_> for InPlace<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok(self.0(text))
    }
}

/// A text that many objects have.
struct SharedText(Arc<str>);

impl<'de> Deserialize<'de> for SharedText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        shared(from).map(Self)
    }
}

/// Reads a text that many objects have.
pub(super) fn shared<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
    InPlace(kplane_model::shared).deserialize(from)
}

/// Reads a text that many objects have, if there is one.
pub(super) fn maybe_shared<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Arc<str>>, D::Error> {
    Ok(Option::<SharedText>::deserialize(from)?.map(|text| text.0))
}

/// Reads only the texts with these names. Others may be whole manifests, and change often.
pub(super) fn of_these<'de, D: Deserializer<'de>>(
    names: &'static [&'static str],
    from: D,
) -> Result<Option<Texts>, D::Error> {
    from.deserialize_any(These(names))
}

/// Reads the texts with these names out of a map.
struct These(&'static [&'static str]);

impl<'de> Visitor<'de> for These {
    type Value = Option<Texts>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut texts = Texts::new();
        let known = |text: &str| self.0.iter().copied().find(|name| *name == text);
        while let Some(name) = map.next_key_seed(InPlace(known))? {
            match name {
                Some(name) => drop(texts.insert(name.into(), map.next_value()?)),
                None => map.next_value_seed(InPlace(|_: &str| ()))?,
            }
        }
        Ok(Some(texts).filter(|texts| !texts.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Sample {
        #[serde(default, deserialize_with = "one_and_two")]
        texts: Option<Texts>,
    }

    fn one_and_two<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Texts>, D::Error> {
        of_these(&["one", "two"], from)
    }

    #[test]
    fn only_named_texts_are_kept_and_all_must_be_texts() {
        let read = |text: &str| serde_json::from_str::<Sample>(text).map(|sample| sample.texts);
        let kept = read(r#"{"texts": {"one": "1\n", "o\u006ee": "2", "other": "\u00e9"}}"#);
        assert_eq!(kept.unwrap(), Some([("one".into(), "2".into())].into()));
        for nothing in [r#"{"texts": null}"#, r#"{"texts": {"other": ""}}"#, "{}"] {
            assert_eq!(read(nothing).unwrap(), None, "{nothing}");
        }
        for wrong in [r#"{"texts": {"other": 1}}"#, r#"{"texts": {"one": null}}"#] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
