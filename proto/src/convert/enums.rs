//! Families and protocols.

use kplane_model::{Family, Protocol};

use super::ConvertError;
use crate::v1 as pb;

impl From<Family> for pb::Family {
    fn from(family: Family) -> Self {
        match family {
            Family::V4 => Self::Ipv4,
            Family::V6 => Self::Ipv6,
        }
    }
}

impl From<Protocol> for pb::Protocol {
    fn from(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::Tcp,
            Protocol::Udp => Self::Udp,
            Protocol::Sctp => Self::Sctp,
        }
    }
}

/// Converts a family from the wire.
///
/// # Errors
/// [`ConvertError`] for a number that is no family.
pub fn family(value: i32) -> Result<Family, ConvertError> {
    match pb::Family::try_from(value) {
        Ok(pb::Family::Ipv4) => Ok(Family::V4),
        Ok(pb::Family::Ipv6) => Ok(Family::V6),
        _ => Err(ConvertError::new(
            "family",
            format!("unknown value {value}"),
        )),
    }
}

/// Converts a protocol from the wire.
///
/// # Errors
/// [`ConvertError`] for a number that is no protocol.
pub fn protocol(value: i32) -> Result<Protocol, ConvertError> {
    match pb::Protocol::try_from(value) {
        Ok(pb::Protocol::Tcp) => Ok(Protocol::Tcp),
        Ok(pb::Protocol::Udp) => Ok(Protocol::Udp),
        Ok(pb::Protocol::Sctp) => Ok(Protocol::Sctp),
        _ => Err(ConvertError::new(
            "protocol",
            format!("unknown value {value}"),
        )),
    }
}
