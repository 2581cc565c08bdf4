//! Views that show messages of the protocol field by field.

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

/// Converts a field by a function.
pub(crate) fn convert<W, T>(wire: W, function: impl FnOnce(W) -> T) -> T {
    function(wire)
}

/// Defines views of messages. `= field` names the message's field if it has another name there, and `=> function`
/// converts it in another way than [`FromWire`].
macro_rules! view_of {
    (@convert $function:tt $message:ident $field:ident $source:ident) => {
        view_of!(@convert $function $message $source)
    };
    (@convert [] $message:ident $source:ident) => {
        $crate::wire::FromWire::from_wire($message.$source)
    };
    (@convert [$function:expr] $message:ident $source:ident) => {
        $crate::wire::convert($message.$source, $function)
    };
    ($($(#[$attribute:meta])* $visible:vis struct $view:ident: $message:ident { $(
        $(#[$on_field:meta])* $field:ident: $type:ty $(= $source:ident)? $(=> $function:expr)?,
    )* })+) => { $(
        $(#[$attribute])*
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
        #[serde(rename_all = "camelCase")]
        $visible struct $view {
            $($(#[$on_field])* pub(crate) $field: $type,)*
        }

        impl From<kplane_proto::v1::$message> for $view {
            fn from(message: kplane_proto::v1::$message) -> Self {
                Self { $($field: view_of!(@convert [$($function)?] message $field $($source)?),)* }
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
