//! Answers to questions about who is connected, in the wire format.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use kplane_dataplane::backend::{AffinityPort, Kind, Proxy};
use kplane_dataplane::connected::{
    ConnectedQuestion, ConnectionTable, GroupKey, GroupSums, connected,
};
use kplane_model::parse_ip;
use kplane_proto::v1 as pb;

use super::affinity::port;

/// Maximum number of ServicePorts in a question.
const PORTS: usize = 32;
/// Maximum number of addresses of clients, and of endpoints, in a question.
const ADDRESSES: usize = 32;
/// Maximum number of groups in an answer: 210 bytes each at most, so that a message has less than 256 KiB.
const GROUPS: usize = 1_000;

/// Longest time to read. The control plane waits for longer.
const WITHIN: Duration = Duration::from_secs(4);

/// The right to read the tables: one question at a time, so that many cost a node no more than one core.
static TURN: Mutex<()> = Mutex::new(());

/// Lists who is connected to the ServicePorts of a question. Blocks.
pub(crate) fn answer(
    backend: &str,
    proxy: Option<&dyn Proxy>,
    question: &pb::ConnectedQuestion,
) -> pb::Connected {
    let answered = try_answer(backend, proxy, question);
    answered.unwrap_or_else(|error| pb::Connected {
        error,
        ..pb::Connected::default()
    })
}

fn try_answer(
    backend: &str,
    proxy: Option<&dyn Proxy>,
    question: &pb::ConnectedQuestion,
) -> Result<pb::Connected, String> {
    let unknown = || "the agent does not understand the question".to_owned();
    let kind = Kind::named(backend).ok_or_else(unknown)?;
    let question = read(question).ok_or_else(unknown)?;
    let _turn = turn()?;
    let listed = connected(kind, proxy, &question, WITHIN)?;
    Ok(pb::Connected {
        groups: listed.groups.iter().map(wire).collect(),
        more: listed.more,
        read: listed.read,
        error: String::new(),
    })
}

/// Takes the right to read the tables, or says that an earlier question has it.
fn turn() -> Result<MutexGuard<'static, ()>, String> {
    let turn = TURN.try_lock();
    turn.map_err(|_| "the agent still reads for an earlier question".to_owned())
}

fn read(question: &pb::ConnectedQuestion) -> Option<ConnectedQuestion> {
    let ports = question.ports.iter().take(PORTS).map(port);
    let most = usize::try_from(question.most).unwrap_or(GROUPS);
    Some(ConnectedQuestion {
        ports: ports.collect::<Option<Vec<AffinityPort>>>()?,
        clients: addresses(&question.clients)?,
        endpoints: addresses(&question.endpoints)?,
        most: match most {
            0 => GROUPS,
            most => most.min(GROUPS),
        },
    })
}

/// Reads addresses. More than there may be would be asked for less than was meant.
fn addresses(texts: &[String]) -> Option<HashSet<IpAddr>> {
    if texts.len() > ADDRESSES {
        return None;
    }
    texts.iter().map(|text| parse_ip(text).ok()).collect()
}

fn wire((key, sums): &(GroupKey, GroupSums)) -> pb::ConnectedGroup {
    let table = match key.table {
        ConnectionTable::Conntrack => pb::ConnectionTable::Conntrack,
        ConnectionTable::Ipvs => pb::ConnectionTable::Ipvs,
        ConnectionTable::Proxy => pb::ConnectionTable::Proxy,
    };
    let (bytes, packets) = (sums.bytes, sums.packets);
    pb::ConnectedGroup {
        port: u32::try_from(key.port).unwrap_or(u32::MAX),
        client: key.client.to_string(),
        endpoint: key.endpoint.to_string(),
        table: table.into(),
        established: sums.established,
        unreplied: sums.unreplied,
        handshake: sums.handshake,
        closing: sums.closing,
        newest_s: sums.ages.map(|(newest, _)| newest.as_secs()),
        oldest_s: sums.ages.map(|(_, oldest)| oldest.as_secs()),
        bytes_to_endpoint: bytes.map(|[to, _]| to),
        bytes_to_client: bytes.map(|[_, back]| back),
        packets_to_endpoint: packets.map(|[to, _]| to),
        packets_to_client: packets.map(|[_, back]| back),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message as _;

    use super::*;

    #[test]
    fn the_largest_answer_fits_into_a_message() {
        let many = Duration::from_secs(u64::MAX);
        let ip = IpAddr::from([0xffff_u16; 8]);
        let key = GroupKey {
            port: PORTS,
            client: ip,
            endpoint: (ip, u16::MAX).into(),
            table: ConnectionTable::Proxy,
        };
        let sums = GroupSums {
            established: u64::MAX,
            unreplied: u64::MAX,
            handshake: u64::MAX,
            closing: u64::MAX,
            ages: Some((many, many)),
            bytes: Some([u64::MAX; 2]),
            packets: Some([u64::MAX; 2]),
        };
        let answer = pb::Connected {
            groups: vec![wire(&(key, sums)); GROUPS],
            more: u64::MAX,
            read: u64::MAX,
            error: String::new(),
        };
        let bytes = answer.encoded_len();
        assert!(bytes < 240 << 10, "{bytes}");
    }

    #[test]
    fn questions_have_bounds() {
        let ip = || "10.0.0.1".to_owned();
        let question = |most, clients: Vec<String>| {
            read(&pb::ConnectedQuestion {
                most,
                clients,
                ..pb::ConnectedQuestion::default()
            })
        };
        for (most, expected) in [(0, GROUPS), (7, 7), (5_000, GROUPS)] {
            assert_eq!(question(most, vec![ip()]).unwrap().most, expected);
        }
        assert!(question(1, vec![ip(); ADDRESSES + 1]).is_none());
        assert!(question(1, vec!["rubbish".to_owned()]).is_none());
        let unknown = answer("what", None, &pb::ConnectedQuestion::default());
        assert!(unknown.error.contains("does not understand"));
    }
}
