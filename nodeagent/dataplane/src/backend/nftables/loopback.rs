//! What happens to packets for node ports on loopback addresses: counted where they are refused (K6), and the node ports
//! that the agent's proxy serves there.

use kplane_model::{Family, Protocol};

use super::chain::counter_name;
use super::schema::TABLE;
use super::uapi::*;
use crate::proxy_address::{CAPTURE_TABLE, LOCAL_PORTS};
use kplane_netlink::{Attributes, Messages, NetlinkError, NfSocket, Request};

/// Counts of this network namespace. What cannot be read is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoopbackCounts {
    /// Packets that were refused since the table was made. None where the configuration switches that off.
    pub refused: Vec<(Family, Protocol, u64)>,
    /// Node ports of TCP that lead to the agent's proxy on loopback addresses alone, by family.
    pub served: [u64; 2],
}

impl LoopbackCounts {
    /// Reads the counts of this thread's network namespace.
    pub fn read() -> Self {
        let mut counts = Self::default();
        let Ok(mut socket) = NfSocket::open() else {
            return counts;
        };
        for family in Family::ALL {
            for protocol in Protocol::ALL {
                let packets =
                    counter(&mut socket, family, (TABLE, counter_name(protocol))).ok().flatten();
                counts.refused.extend(packets.map(|packets| (family, protocol, packets)));
            }
            counts.served[family as usize] = served(&mut socket, family).unwrap_or_default();
        }
        counts
    }
}

/// Returns the packets of a counter of a table.
pub(super) fn counter(
    socket: &mut NfSocket,
    family: Family,
    (table, name): (&str, &str),
) -> Result<Option<u64>, NetlinkError> {
    let answer = socket.get(Request::new(
        "read counter",
        msg::GETOBJ,
        nfproto(family),
        |w| {
            w.str(NFTA_OBJ_TABLE, table);
            w.str(NFTA_OBJ_NAME, name);
            w.u32(NFTA_OBJ_TYPE, NFT_OBJECT_COUNTER);
        },
    ))?;
    let data = Messages(&answer).find_map(|message| message.attributes().get(NFTA_OBJ_DATA));
    Ok(data.and_then(|data| packets(data.children())))
}

/// Returns the packets that the attributes of a counter say.
pub(super) fn packets(counter: Attributes<'_>) -> Option<u64> {
    let packets = counter.get(NFTA_COUNTER_PACKETS)?;
    packets.payload.try_into().ok().map(u64::from_be_bytes)
}

/// Returns the number of node ports of TCP in the set of those that are led to the proxy.
fn served(socket: &mut NfSocket, family: Family) -> Result<u64, NetlinkError> {
    let what = "read node ports on loopback addresses";
    let request = Request::new(what, msg::GETSETELEM, nfproto(family), |w| {
        w.str(NFTA_SET_ELEM_LIST_TABLE, CAPTURE_TABLE);
        w.str(NFTA_SET_ELEM_LIST_SET, LOCAL_PORTS);
    });
    let mut ports = 0;
    socket.dump_each(request, |message| {
        let list = message.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS);
        let elements = list.into_iter().flat_map(kplane_netlink::Attribute::children);
        ports += elements.filter(|element| is_tcp(element.children())).count() as u64;
    })?;
    Ok(ports)
}

/// Returns whether the key of an element begins with TCP's number.
fn is_tcp(element: Attributes<'_>) -> bool {
    let key = element.get(NFTA_SET_ELEM_KEY);
    let value = key.and_then(|key| key.children().get(NFTA_DATA_VALUE));
    let protocol = value.and_then(|value| value.payload.first());
    protocol == Some(&Protocol::Tcp.number())
}
