//! Views that show messages of the protocol field by field.

use std::fmt::Debug;

use serde::Serializer;

use crate::time::Time;

/// The conversion of a field. Where a view's field is optional, zero and empty texts are `None`.
pub(crate) trait FromWire<W> {
    fn from_wire(wire: W) -> Self;
}

impl<W, T: FromWire<W>> FromWire<Vec<W>> for Vec<T> {
    fn from_wire(wire: Vec<W>) -> Self {
        wire.into_iter().map(T::from_wire).collect()
    }
}

impl<W, T: FromWire<W>> FromWire<Option<W>> for Option<T> {
    fn from_wire(wire: Option<W>) -> Self {
        wire.map(T::from_wire)
    }
}

impl FromWire<u64> for Option<Time> {
    fn from_wire(ms: u64) -> Self {
        Time::from_wire(ms)
    }
}

macro_rules! values {
    ($($type:ty)*) => { $(
        impl FromWire<$type> for $type {
            fn from_wire(wire: $type) -> Self {
                wire
            }
        }

        impl FromWire<$type> for Option<$type> {
            fn from_wire(wire: $type) -> Self {
                Some(wire).filter(|wire| *wire != <$type>::default())
            }
        }
    )* };
}

values!(bool String u32 u64);

/// Returns the value of an enum; the default for values that a newer server may add.
pub(crate) fn known<E: Default + TryFrom<i32>>(number: i32) -> E {
    E::try_from(number).unwrap_or_default()
}

/// Returns the name of an enum's value.
pub(crate) fn name<E: Debug + Default + TryFrom<i32>>(number: i32) -> String {
    format!("{:?}", known::<E>(number)).replace("Unspecified", "Unknown")
}

/// Serializes the name of an enum's value.
pub(crate) fn named<E: Debug, S: Serializer>(value: &E, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{value:?}"))
}

/// Serializes the name of an enum's value; `Unknown` if it is unspecified.
pub(crate) fn known_name<E: Debug, S: Serializer>(value: &E, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&format!("{value:?}").replace("Unspecified", "Unknown"))
}

/// Converts a field by a function.
pub(crate) fn convert<W, T>(wire: W, function: impl FnOnce(W) -> T) -> T {
    function(wire)
}

/// Defines views of messages; `as` a kind if they are results of their own. `= field` names the message's field if it
/// has another name there, `= _` leaves a field to the view's maker, and `=> function` converts in another way than
/// [`FromWire`].
macro_rules! view_of {
    (@convert [] $message:ident $field:ident _) => {
        Default::default()
    };
    (@convert $function:tt $message:ident $field:ident $source:ident) => {
        view_of!(@convert $function $message $source)
    };
    (@convert [] $message:ident $source:ident) => {
        $crate::wire::FromWire::from_wire($message.$source)
    };
    (@convert [$function:expr] $message:ident $source:ident) => {
        $crate::wire::convert($message.$source, $function)
    };
    ($($(#[$attribute:meta])* $visible:vis struct $view:ident: $message:ident $(as $kind:literal)? { $(
        $(#[$on_field:meta])* $field:ident: $type:ty $(= $source:tt)? $(=> $function:expr)?,
    )* })+) => { $(
        $(#[$attribute])*
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        $visible struct $view {
            $(api_version: &'static str, #[doc = $kind] kind: &'static str,)?
            $($(#[$on_field])* pub(crate) $field: $type,)*
        }

        impl From<kplane_proto::v1::$message> for $view {
            fn from(message: kplane_proto::v1::$message) -> Self {
                Self {
                    $(api_version: $crate::API_VERSION, kind: $kind,)?
                    $($field: view_of!(@convert [$($function)?] message $field $($source)?),)*
                }
            }
        }

        impl $crate::wire::FromWire<kplane_proto::v1::$message> for $view {
            fn from_wire(message: kplane_proto::v1::$message) -> Self {
                message.into()
            }
        }
    )+ };
}
pub(crate) use view_of;
