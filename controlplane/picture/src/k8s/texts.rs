//! Texts of objects, read without a copy of what is not kept.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Labels or annotations.
pub type Texts = BTreeMap<Arc<str>, Arc<str>>;

/// A text that many objects have.
struct Shared(Arc<str>);

impl From<&str> for Shared {
    fn from(text: &str) -> Self {
        Self(kplane_model::shared(text))
    }
}

/// A text that nobody keeps.
struct Skipped;

impl From<&str> for Skipped {
    fn from(_: &str) -> Self {
        Self
    }
}

/// Reads a text from where it stands.
struct InPlace<T>(std::marker::PhantomData<T>);

impl<T: for<'t> From<&'t str>> Visitor<'_> for InPlace<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok(text.into())
    }
}

impl<'de> Deserialize<'de> for Shared {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(InPlace(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(InPlace(std::marker::PhantomData))
    }
}

/// Reads a text that many objects have.
pub(super) fn shared<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
    Ok(Shared::deserialize(from)?.0)
}

/// Reads a text that many objects have, if there is one.
pub(super) fn maybe_shared<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Arc<str>>, D::Error> {
    Ok(Option::<Shared>::deserialize(from)?.map(|text| text.0))
}

/// Reads only the texts with these names. Others may be whole manifests, and change often.
pub(super) fn of_these<'de, D: Deserializer<'de>>(
    names: &'static [&'static str],
    from: D,
) -> Result<Option<Texts>, D::Error> {
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
            while let Some(Known(name)) = map.next_key_seed(&self)? {
                match name {
                    Some(name) => drop(texts.insert(name.into(), map.next_value()?)),
                    None => map.next_value::<Skipped>().map(|Skipped| ())?,
                }
            }
            Ok(Some(texts).filter(|texts| !texts.is_empty()))
        }
    }

    /// One of the names, or another one.
    struct Known(Option<&'static str>);

    impl<'de> serde::de::DeserializeSeed<'de> for &These {
        type Value = Known;

        fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Known, D::Error> {
            struct Name<'a>(&'a These);

            impl Visitor<'_> for Name<'_> {
                type Value = Known;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("a string")
                }

                fn visit_str<E>(self, text: &str) -> Result<Known, E> {
                    Ok(Known(self.0.0.iter().copied().find(|name| *name == text)))
                }
            }
            from.deserialize_str(Name(self))
        }
    }

    from.deserialize_any(These(names))
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
