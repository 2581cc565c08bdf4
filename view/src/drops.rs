//! Samples of packets that NetworkPolicies denied.

use kplane_model::Protocol;
use kplane_proto::v1::{self as pb, PolicyDirection};
use serde::Serialize;

use super::View;
use super::silent::AskedView;
use crate::style::{Canvas, Tone};
use crate::text::{Span, grouped, paragraph};
use crate::time::Time;
use crate::wire::{FromWire, known_name};

fn shown(direction: PolicyDirection) -> &'static str {
    match direction {
        PolicyDirection::Ingress => "ingress",
        PolicyDirection::Egress => "egress",
        PolicyDirection::Unspecified => "unknown",
    }
}

/// A packet that policies denied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PacketView {
    at: Option<Time>,
    node: String,
    /// The direction of the policies that denied it.
    #[serde(serialize_with = "known_name")]
    direction: PolicyDirection,
    from: String,
    from_pod: Option<String>,
    /// `null` = the protocol has no ports, or they are not known.
    from_port: Option<u32>,
    to: String,
    to_pod: Option<String>,
    to_port: Option<u32>,
    /// Its name, or its number.
    protocol: String,
    /// The policies that isolate the Pod and do not allow the connection; none if they allow it by now.
    isolating: Vec<String>,
}

impl From<pb::DroppedPacket> for PacketView {
    fn from(of: pb::DroppedPacket) -> Self {
        let packet = of.packet.unwrap_or_default();
        let protocol = u8::try_from(packet.protocol).ok();
        let named = protocol.and_then(Protocol::from_number);
        Self {
            at: Time::from_wire(of.at_ms),
            node: of.node,
            direction: packet.direction(),
            from_pod: FromWire::from_wire(of.from_pod),
            from_port: FromWire::from_wire(packet.from_port),
            to_pod: FromWire::from_wire(of.to_pod),
            to_port: FromWire::from_wire(packet.to_port),
            protocol: named.map_or_else(
                || format!("protocol {}", packet.protocol),
                |named| named.to_string(),
            ),
            isolating: of.isolating,
            from: packet.from,
            to: packet.to,
        }
    }
}

impl PacketView {
    fn line(&self) -> String {
        let end = |pod: &Option<String>, address: &str, port: Option<u32>| {
            let at = match port {
                Some(port) if address.contains(':') => format!("[{address}]:{port}"),
                Some(port) => format!("{address}:{port}"),
                None => address.to_owned(),
            };
            match pod {
                Some(pod) => format!("{pod} ({at})"),
                None => at,
            }
        };
        let at = self.at.map_or_else(|| "?".to_owned(), Time::local);
        let from = end(&self.from_pod, &self.from, self.from_port);
        let to = end(&self.to_pod, &self.to, self.to_port);
        let (node, direction, protocol) = (&self.node, shown(self.direction), &self.protocol);
        let why = match self.isolating.as_slice() {
            [] => "policies allow it by now".to_owned(),
            some => format!("isolated by {}", some.join(", ")),
        };
        format!("{at}  {node}  {direction}  {from} to {to} {protocol}: {why}")
    }
}

/// The view of what `kpctl get drops --follow` has new.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FollowedView {
    api_version: &'static str,
    kind: &'static str,
    /// Oldest first.
    packets: Vec<PacketView>,
    /// The number of samples that were lost since the question before.
    lost: u64,
    nodes: AskedView,
    /// Whether to say who answered.
    #[serde(skip)]
    says_who: bool,
}

impl From<pb::DropsAnswer> for FollowedView {
    fn from(mut answer: pb::DropsAnswer) -> Self {
        let packets = answer.packets.drain(..).map(PacketView::from).collect();
        Self {
            api_version: super::API_VERSION,
            kind: "DroppedPackets",
            packets,
            lost: answer.lost,
            nodes: FromWire::from_wire(answer.nodes),
            says_who: true,
        }
    }
}

impl FollowedView {
    /// Returns whether all nodes answered.
    pub fn is_complete(&self) -> bool {
        self.nodes.is_complete()
    }

    /// Returns whether there is something to show after the last view; who answered is shown if it has changed.
    pub fn is_news(&mut self, last: Option<&Self>) -> bool {
        self.says_who = last.is_none_or(|last| last.nodes != self.nodes);
        self.says_who || !self.packets.is_empty() || self.lost > 0
    }
}

impl View for FollowedView {
    fn text(&self, canvas: &Canvas) -> String {
        let lines = self
            .packets
            .iter()
            .map(PacketView::line)
            .map(|line| paragraph(&Span::plain(line), canvas, 0));
        let mut out: String = lines.collect();
        if self.lost > 0 {
            let text = format!("{} samples were lost", grouped(self.lost));
            out.push_str(&paragraph(&Span::new(text, Tone::Warn), canvas, 0));
        }
        if self.says_who {
            let text = format!("Following denied packets: {}.", self.nodes.summary());
            out.push_str(&paragraph(&Span::new(text, Tone::Faint), canvas, 0));
            out.push_str(&self.nodes.text(canvas));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{has, words};
    use super::*;

    fn answered(asked: u64, answered: u64) -> pb::DropsAnswer {
        pb::DropsAnswer {
            nodes: Some(kpctl_samples::asked(asked, answered)),
            ..pb::DropsAnswer::default()
        }
    }

    fn packet(isolating: &[&str]) -> pb::DroppedPacket {
        pb::DroppedPacket {
            node: "n1".to_owned(),
            packet: Some(pb::DeniedPacket {
                direction: PolicyDirection::Egress.into(),
                from: "fd00::7".to_owned(),
                to: "192.0.2.1".to_owned(),
                protocol: 6,
                from_port: 4_000,
                ..pb::DeniedPacket::default()
            }),
            from_pod: "shop/web-1".to_owned(),
            isolating: isolating.iter().map(ToString::to_string).collect(),
            ..pb::DroppedPacket::default()
        }
    }

    #[test]
    fn a_packet_is_a_line_and_who_answered_is_said_when_it_changes() {
        let answer = pb::DropsAnswer {
            packets: vec![packet(&["shop/deny"]), packet(&[])],
            lost: 4,
            ..answered(1, 1)
        };
        let mut view = FollowedView::from(answer);
        assert!(view.is_news(None));
        let text = words(&view);
        for part in [
            "n1 egress shop/web-1 ([fd00::7]:4000) to 192.0.2.1 TCP: isolated by shop/deny ? n1",
            "TCP: policies allow it by now",
            "4 samples were lost",
            "Following denied packets: 1 of 1 nodes answered.",
        ] {
            has(&text, part);
        }
        let mut quiet = FollowedView::from(answered(1, 1));
        assert!(!quiet.is_news(Some(&view)));
        let mut silent = FollowedView::from(answered(1, 0));
        assert!(silent.is_news(Some(&quiet)) && !silent.is_complete());
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(json["packets"][0]["protocol"], "TCP");
        assert_eq!(json["packets"][0]["toPort"], serde_json::Value::Null);
    }
}
