//! Addresses: packed lists on the wire, typed in the model.

use std::net::IpAddr;

use bytes::{BufMut, Bytes, BytesMut};
use kplane_model::{Cidr, EndpointAddr, Family, refused_endpoint_ip};

use super::ConvertError;
use crate::v1 as pb;

/// Length of a port in a packed endpoint, in bytes.
const PORT_LEN: usize = 2;

pub(super) fn put_ip(buf: &mut impl BufMut, ip: IpAddr) {
    match ip {
        IpAddr::V4(v4) => buf.put_slice(&v4.octets()),
        IpAddr::V6(v6) => buf.put_slice(&v6.octets()),
    }
}

/// Encodes an address: 4 or 16 bytes.
pub fn ip_bytes(ip: IpAddr) -> Vec<u8> {
    let mut buf = Vec::with_capacity(16);
    put_ip(&mut buf, ip);
    buf
}

pub(super) fn pack_ips(ips: &[IpAddr]) -> Bytes {
    let mut buf = BytesMut::new();
    for ip in ips {
        put_ip(&mut buf, *ip);
    }
    buf.freeze()
}

pub(super) fn pack_endpoints(endpoints: impl Iterator<Item = EndpointAddr>) -> Bytes {
    let mut buf = BytesMut::new();
    for endpoint in endpoints {
        put_ip(&mut buf, endpoint.ip);
        buf.put_u16(endpoint.port);
    }
    buf.freeze()
}

/// Decodes an address of any family.
///
/// # Errors
/// The bytes are none.
pub fn unpack_ip(field: &'static str, bytes: &[u8]) -> Result<IpAddr, ConvertError> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Ok(IpAddr::from(v4));
    }
    <[u8; 16]>::try_from(bytes)
        .map(IpAddr::from)
        .map_err(|_| ConvertError::new(field, format!("{} bytes are not an address", bytes.len())))
}

/// Decodes an address of the given family.
pub(super) fn unpack_ip_of(
    field: &'static str,
    family: Family,
    bytes: &[u8],
) -> Result<IpAddr, ConvertError> {
    let ip = unpack_ip(field, bytes)?;
    if Family::of(ip) != family {
        return Err(ConvertError::new(field, format!("{ip} is not {family}")));
    }
    Ok(ip)
}

/// Decodes packed addresses of one family.
pub(super) fn unpack_ips(
    field: &'static str,
    family: Family,
    bytes: &[u8],
) -> Result<Vec<IpAddr>, ConvertError> {
    records(field, family.address_len(), bytes)?
        .map(|record| unpack_ip(field, record))
        .collect()
}

/// Decodes packed endpoints of one family; refuses port 0 and addresses on the node itself.
pub(super) fn unpack_endpoints(
    field: &'static str,
    family: Family,
    bytes: &[u8],
) -> Result<Vec<EndpointAddr>, ConvertError> {
    records(field, family.address_len() + PORT_LEN, bytes)?
        .map(|record| {
            let cut = || ConvertError::new(field, "a cut record".to_owned());
            let (ip, port) = record.split_last_chunk::<PORT_LEN>().ok_or_else(cut)?;
            let ip = unpack_ip(field, ip)?;
            let port = u16::from_be_bytes(*port);
            if port == 0 {
                return Err(ConvertError::new(field, format!("port 0 of {ip}")));
            }
            match refused_endpoint_ip(ip) {
                Some(reason) => Err(ConvertError::new(field, format!("{ip} {reason}"))),
                None => Ok(EndpointAddr { ip, port }),
            }
        })
        .collect()
}

/// Splits packed records of a fixed length.
fn records<'a>(
    field: &'static str,
    record_len: usize,
    bytes: &'a [u8],
) -> Result<std::slice::ChunksExact<'a, u8>, ConvertError> {
    if !bytes.len().is_multiple_of(record_len) {
        let reason = format!("{} bytes are not a multiple of {record_len}", bytes.len());
        return Err(ConvertError::new(field, reason));
    }
    Ok(bytes.chunks_exact(record_len))
}

pub(super) fn port(field: &'static str, value: u32) -> Result<u16, ConvertError> {
    match u16::try_from(value) {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(ConvertError::new(field, format!("{value} is not a port"))),
    }
}

/// Returns a port, or `None` for 0.
pub(super) fn optional_port(field: &'static str, value: u32) -> Result<Option<u16>, ConvertError> {
    (value != 0).then(|| port(field, value)).transpose()
}

impl From<&Cidr> for pb::Cidr {
    fn from(cidr: &Cidr) -> Self {
        cidr_to_wire(cidr)
    }
}

pub(super) fn cidr_to_wire(cidr: &Cidr) -> pb::Cidr {
    pb::Cidr {
        address: ip_bytes(cidr.first()),
        prefix_len: u32::from(cidr.prefix_len()),
    }
}

pub(super) fn cidr_from_wire(field: &'static str, cidr: &pb::Cidr) -> Result<Cidr, ConvertError> {
    let ip = unpack_ip(field, &cidr.address)?;
    u8::try_from(cidr.prefix_len)
        .ok()
        .and_then(|len| Cidr::new(ip, len))
        .ok_or_else(|| ConvertError::new(field, format!("prefix length {}", cidr.prefix_len)))
}
