//! How many packets NetworkPolicies denied: of each isolated Pod, and in all.

// Bytes and texts from outside must not end the program.
#![deny(clippy::indexing_slicing)]

use std::net::IpAddr;

use kplane_model::{Direction, Family};

use super::decode::KeyReader;
use super::loopback::{counter, packets};
use super::policy_schema::denied;
use super::table_kind::POLICY_TABLE;
use super::uapi::*;
use kplane_netlink::{Attribute, Attributes, Errno, NetlinkError, NfSocket, Request};

/// The packets of a Pod that policies of one direction denied, since they isolate it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeniedPod {
    /// The Pod's address.
    pub address: IpAddr,
    /// The policies' direction.
    pub direction: Direction,
    /// Number of packets; not 0.
    pub packets: u64,
}

/// Reads the counts of all Pods in this thread's network namespace; none without the table of policies.
///
/// # Errors
/// [`NetlinkError`].
pub fn denied_pods() -> Result<Vec<DeniedPod>, NetlinkError> {
    let mut socket = NfSocket::open()?;
    let mut pods = Vec::new();
    for family in Family::ALL {
        for direction in Direction::ALL {
            let what = "read counts of denied packets";
            let request = Request::new(what, msg::GETSETELEM, nfproto(family), |w| {
                w.str(NFTA_SET_ELEM_LIST_TABLE, POLICY_TABLE);
                w.str(NFTA_SET_ELEM_LIST_SET, denied(direction));
            });
            let read = socket.dump_each(request, |message| {
                let list = message.attributes().get(NFTA_SET_ELEM_LIST_ELEMENTS);
                let elements = list.into_iter().flat_map(Attribute::children);
                pods.extend(elements.filter_map(|element| {
                    let (address, packets) = pod(element.children(), family)?;
                    (packets > 0).then_some(DeniedPod {
                        address,
                        direction,
                        packets,
                    })
                }));
            });
            match read {
                Err(error) if error.errno() == Some(Errno::ENOENT) => {}
                read => read.map(drop)?,
            }
        }
    }
    // A list that another program's change tore is read again.
    pods.sort_unstable();
    pods.dedup_by_key(|pod| (pod.address, pod.direction));
    Ok(pods)
}

/// Returns the address and the count of an element.
fn pod(element: Attributes<'_>, family: Family) -> Option<(IpAddr, u64)> {
    let key = element.get(NFTA_SET_ELEM_KEY)?;
    let bytes = key.children().get(NFTA_DATA_VALUE)?.payload;
    let address = KeyReader { bytes, family }.ip()?;
    let counter = element.get(NFTA_SET_ELEM_EXPR)?.children();
    let packets = packets(counter.get(NFTA_EXPR_DATA)?.children())?;
    Some((address, packets))
}

/// Reads how many packets were denied since the tables of this thread's network namespace were made. What cannot be read
/// is left out.
pub fn denied_packets() -> Vec<(Family, Direction, u64)> {
    let Ok(mut socket) = NfSocket::open() else {
        return Vec::new();
    };
    let mut counts = Vec::new();
    for family in Family::ALL {
        for direction in Direction::ALL {
            let name = (POLICY_TABLE, denied(direction));
            let packets = counter(&mut socket, family, name).ok().flatten();
            counts.extend(packets.map(|packets| (family, direction, packets)));
        }
    }
    counts
}
