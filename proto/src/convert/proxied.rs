//! Conversion of what a Service asks of the userspace proxy.

use kplane_model::{Balance, Cidr, Proxied, ProxyHeader};

use super::ConvertError;
use super::address::{cidr_from_wire, cidr_to_wire};
use crate::v1 as pb;

impl From<&Proxied> for pb::Proxied {
    fn from(proxied: &Proxied) -> Self {
        let weight = |(range, weight): &(Cidr, u16)| pb::EndpointWeight {
            range: Some(cidr_to_wire(range)),
            weight: (*weight).into(),
        };
        Self {
            balance: proxied.balance.as_str().to_owned(),
            proxy_protocol: proxied
                .header
                .map(|header| header.as_str().to_owned())
                .unwrap_or_default(),
            no_retry: !proxied.retry,
            weights: proxied.weights.iter().map(weight).collect(),
        }
    }
}

impl From<&Proxied> for pb::ProxiedView {
    fn from(proxied: &Proxied) -> Self {
        let weights = proxied.weights.iter();
        let wire = pb::Proxied::from(proxied);
        Self {
            balance: wire.balance,
            proxy_protocol: wire.proxy_protocol,
            no_retry: wire.no_retry,
            weights: weights
                .map(|(range, weight)| format!("{range}={weight}"))
                .collect(),
        }
    }
}

impl TryFrom<pb::Proxied> for Proxied {
    type Error = ConvertError;

    fn try_from(wire: pb::Proxied) -> Result<Self, ConvertError> {
        let unknown = |field, name: &str| ConvertError::new(field, format!("{name:?} is unknown"));
        let balance = Balance::parse(&wire.balance);
        let header = match wire.proxy_protocol.as_str() {
            "" => None,
            name => Some(
                ProxyHeader::parse(name).ok_or_else(|| unknown("proxied.proxy_protocol", name))?,
            ),
        };
        if wire.weights.len() > Self::MAX_WEIGHTS {
            let (count, most) = (wire.weights.len(), Self::MAX_WEIGHTS);
            return Err(ConvertError::new(
                "proxied.weights",
                format!("has {count} items, but at most {most} are allowed"),
            ));
        }
        Ok(Self {
            balance: balance.ok_or_else(|| unknown("proxied.balance", &wire.balance))?,
            header,
            retry: !wire.no_retry,
            weights: wire.weights.iter().map(weight).collect::<Result<_, _>>()?,
        })
    }
}

fn weight(wire: &pb::EndpointWeight) -> Result<(Cidr, u16), ConvertError> {
    let field = "proxied.weights";
    let missing = || ConvertError::new(field, "has no range");
    let range = wire.range.as_ref().ok_or_else(missing)?;
    let range = cidr_from_wire(field, range)?;
    match u16::try_from(wire.weight) {
        Ok(weight) if weight > 0 => Ok((range, weight)),
        _ => Err(ConvertError::new(
            field,
            format!("{} is not in 1..=65535", wire.weight),
        )),
    }
}
