//! Reads `scenarios.txt`.
//!
//! `let NAME YAML` names what endpoints may have. A scenario begins with `== NAME` and has one Service, of type
//! LoadBalancer with node ports and an external IP, unless it says otherwise, and one line for each of:
//!
//! | line | meaning |
//! |---|---|
//! | `vary NAME: X \| Y` | a scenario for each text, which takes the place of `$NAME` |
//! | `always` | all settings, and not the usual ones only |
//! | `sticky` | all packets are of Services with session affinity |
//! | `keep flow/udp` | sockets that stay open through all steps, or `choice/tcp`: the choice of an endpoint |
//! | `service [plain\|one-port]` | the Service (anew), as ClusterIP without more, or with one port and no external IP |
//! | `another`, `spare`, `no service` | a Service with the next number; the next number stays free; no Service |
//! | `/PATH YAML` | a field of the Service, `*` in its path means each entry |
//! | `pods a c:NAME` | slices with these pods in both families, `-` is none |
//! | `again a:NAME` | the same, in further slices |
//! | `slice /PATH YAML` | a field of the slices of the last such line |
//! | `node 1 zone-2` | a node's object |
//! | `step` | what follows comes later; only what it writes changes |
//! | `gone` | all objects so far are deleted |
//! | `ask [+1] PLACES [by CLIENTS] [from IP]` | packets by TCP and UDP: to kinds of addresses, all of them (`everywhere`) or literal ones; `+80` and `=80` change the port, `/tcp` is TCP only. Without a line: everywhere |
//!
//! Values may name the addresses of the scenario's Service (`$cluster4`, `$external6`, `$balancer4`, and
//! `$balancer4+1` of the next number), its node port (`$port`) and, in slices, addresses of their family (`$a`, `$node1`, `$outside`).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail, ensure};
use kplane_model::{Family, Protocol};
use kplane_tests::support::cluster::node_in;
use kplane_tests::support::objects::{self, slices};
use kplane_tests::support::{At, Client, Question, Setup, ep, node_ip, svc};
use serde_json::{Value, json};

use crate::conformance::scenario::{Scenario, Step, admissible, everywhere, plain};
use crate::conformance::stand::Kept;
use kplane_tests::support::fate::Packet;

const TEXT: &str = include_str!("scenarios.txt");
/// The number of the first Service.
const FIRST: u16 = 600;
/// Clients that keep sockets open.
const KEEPERS: [Client; 4] = [
    Client::Outside,
    Client::PodHere,
    Client::PodThere,
    Client::Node,
];

/// A line and its number.
type Line = (usize, String);

/// Returns the scenarios of the file.
pub(crate) fn scenarios() -> Result<Vec<Scenario>> {
    let mut names = BTreeMap::new();
    let mut blocks: Vec<Vec<Line>> = Vec::new();
    for (number, line) in (1..).zip(TEXT.lines()) {
        match (
            line.split_once(' ').unwrap_or((line, "")),
            blocks.last_mut(),
        ) {
            (("" | "#", _), _) => {}
            (("let", rest), _) => {
                let (name, yaml) = rest.split_once(' ').context(rest)?;
                names.insert(name, serde_saphyr::from_str(yaml)?);
            }
            (("==", name), _) => blocks.push(vec![(number, name.to_owned())]),
            (_, Some(block)) => block.push((number, line.to_owned())),
            (_, None) => bail!("line {number} is of no scenario"),
        }
    }
    let (mut scenarios, mut number) = (Vec::new(), FIRST);
    for block in blocks.into_iter().flat_map(varied) {
        let mut draft = Draft::new(&names, number, &block);
        for (at, line) in &block[1..] {
            draft.read(*at, line).with_context(|| format!("line {at}: {line}"))?;
        }
        number = draft.last + 1;
        scenarios.push(draft.finish()?);
    }
    Ok(scenarios)
}

/// Returns a block for each combination of what it varies.
fn varied(block: Vec<Line>) -> Vec<Vec<Line>> {
    let vary = |(_, line): &Line| line.starts_with("vary ");
    let Some(at) = block.iter().position(vary) else {
        return vec![block];
    };
    let mut rest = block;
    let (_, line) = rest.remove(at);
    let (name, texts) = line[5..].split_once(": ").unwrap_or_default();
    let with = |text: &str| {
        let fill = |(at, line): &Line| (*at, line.replace(&format!("${name}"), text));
        varied(rest.iter().map(fill).collect())
    };
    texts.split(" | ").flat_map(with).collect()
}

/// A scenario that is being read.
struct Draft<'a> {
    names: &'a BTreeMap<&'a str, Value>,
    scenario: Scenario,
    /// The numbers of its first Service, of the one that is written, and of the last that is taken.
    first: u16,
    number: u16,
    last: u16,
    service: Option<Value>,
    slices: Vec<Value>,
    /// Where the slices of the last line begin.
    begin: usize,
    kept: Vec<Kept>,
    sticky: bool,
}

impl<'a> Draft<'a> {
    fn new(names: &'a BTreeMap<&'a str, Value>, number: u16, block: &[Line]) -> Self {
        let (line, name) = block.first().cloned().unwrap_or_default();
        Self {
            names,
            scenario: Scenario {
                setups: vec![Setup::PodRanges],
                steps: vec![Step::named(name, line)],
            },
            first: number,
            number,
            last: number,
            service: Some(everywhere(number)),
            slices: Vec::new(),
            begin: 0,
            kept: Vec::new(),
            sticky: false,
        }
    }

    fn read(&mut self, at: usize, line: &str) -> Result<()> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "always" => self.scenario.setups.clear(),
            "sticky" => self.sticky = true,
            "no" => self.service = None,
            "spare" => self.last += 1,
            "service" => {
                self.service = Some(match rest {
                    "plain" => plain(self.number),
                    "one-port" => objects::load_balancer(self.number),
                    _ => everywhere(self.number),
                });
            }
            "another" => {
                self.write();
                self.last += 1;
                self.number = self.last;
                self.service = Some(everywhere(self.number));
            }
            "pods" | "again" => self.pods(rest, word == "again")?,
            "slice" => self.slice(rest)?,
            "step" => self.step(at)?,
            "gone" => {
                let before =
                    self.scenario.steps.iter().flat_map(|step| &step.objects).cloned().collect();
                self.current().gone = before;
            }
            "node" => {
                let (node, zone) = rest.split_once(' ').context("NODE ZONE")?;
                let node = node_in(node.parse()?, zone);
                self.current().objects.push(node);
            }
            "keep" => self.keep(rest)?,
            "ask" => self.ask(at, rest)?,
            path if path.starts_with('/') => {
                let value = serde_saphyr::from_str(&self.filled(rest, None))?;
                let number = self.number;
                let service = self.service.get_or_insert_with(|| everywhere(number));
                set(service, &path[1..], &value);
            }
            other => bail!("what is {other}?"),
        }
        Ok(())
    }

    fn current(&mut self) -> &mut Step {
        let at = self.scenario.steps.len() - 1;
        &mut self.scenario.steps[at]
    }

    /// Puts the Service and its slices among the step's objects.
    fn write(&mut self) {
        let service = self.service.take().map(admissible);
        let slices = std::mem::take(&mut self.slices);
        self.current().objects.extend(service.into_iter().chain(slices));
    }

    /// Begins the next step.
    fn step(&mut self, at: usize) -> Result<()> {
        self.end_step()?;
        let steps = &mut self.scenario.steps;
        let name = steps[0].name.split(", step").next().unwrap_or_default().to_owned();
        steps[0].name = format!("{name}, step 1");
        let next = format!("{name}, step {}", steps.len() + 1);
        steps.push(Step::named(next, at));
        self.number = self.first;
        Ok(())
    }

    fn end_step(&mut self) -> Result<()> {
        self.write();
        let step = self.current();
        match (step.packets.is_empty(), step.line) {
            (true, line) => self.ask(line, "everywhere"),
            (false, _) => Ok(()),
        }
    }

    fn finish(mut self) -> Result<Scenario> {
        self.end_step()?;
        for step in &mut self.scenario.steps {
            step.kept.clone_from(&self.kept);
            step.packets.iter_mut().for_each(|packet| packet.sticky = self.sticky);
        }
        Ok(self.scenario)
    }

    /// Makes slices with these pods: with further names if there are some already.
    fn pods(&mut self, words: &str, again: bool) -> Result<()> {
        let pods = words
            .split(' ')
            .filter(|word| *word != "-")
            .map(|word| {
                let (pod, name) = word.split_once(':').unwrap_or((word, ""));
                let more = match name {
                    "" => json!({}),
                    name => self.names.get(name).context(name.to_owned())?.clone(),
                };
                Ok((pod, more))
            })
            .collect::<Result<Vec<_>>>()?;
        let known = everywhere(self.number);
        let mut new = slices(self.service.as_ref().unwrap_or(&known), &pods);
        if again {
            for slice in &mut new {
                let name = format!(
                    "{}-z",
                    slice["metadata"]["name"].as_str().unwrap_or_default()
                );
                slice["metadata"]["name"] = json!(name);
            }
        }
        self.begin = self.slices.len();
        self.slices.append(&mut new);
        Ok(())
    }

    fn slice(&mut self, rest: &str) -> Result<()> {
        let (path, yaml) = rest.split_once(' ').context("PATH YAML")?;
        for at in self.begin..self.slices.len() {
            let family = if self.slices[at]["addressType"] == json!("IPv6") {
                Family::V6
            } else {
                Family::V4
            };
            let value = serde_saphyr::from_str(&self.filled(yaml, Some(family)))?;
            set(&mut self.slices[at], &path[1..], &value);
        }
        Ok(())
    }

    fn keep(&mut self, words: &str) -> Result<()> {
        for word in words.split(' ') {
            let (kept, protocol): (fn(Question) -> Kept, _) = match word {
                "flow/udp" => (Kept::Flow, Protocol::Udp),
                "flow/tcp" => (Kept::Flow, Protocol::Tcp),
                "choice/tcp" => (Kept::Choice, Protocol::Tcp),
                other => bail!("what is {other}?"),
            };
            for (client, family) in KEEPERS.into_iter().flat_map(|c| Family::ALL.map(|f| (c, f))) {
                for at in [At::ClusterIp, At::NodePort, At::LoadBalancer] {
                    let to = svc(self.first).address(at, family, client.node());
                    self.kept.push(kept(Question::new(client, protocol, to)));
                }
            }
        }
        Ok(())
    }

    fn ask(&mut self, at: usize, rest: &str) -> Result<()> {
        let text = self.filled(rest, None);
        let (text, source) = text.split_once(" from ").unwrap_or((&text, ""));
        let (places, clients) = text.split_once(" by ").unwrap_or((text, ""));
        let is_asked = |client: &Client| {
            let mut names = clients.split(' ');
            clients.is_empty() || names.any(|name| name == format!("{client:?}"))
        };
        let clients: Vec<Client> = Client::ALL.into_iter().filter(is_asked).collect();
        let mut number = self.first;
        for place in places.split(' ') {
            if place == "+1" {
                number += 1;
                continue;
            }
            let (place, protocols) = match place.strip_suffix("/tcp") {
                Some(place) => (place, &[Protocol::Tcp][..]),
                None => (place, &[Protocol::Tcp, Protocol::Udp][..]),
            };
            for client in &clients {
                for to in addresses(place, number, *client)? {
                    for protocol in protocols {
                        let question = Question::new(*client, *protocol, to);
                        let question = match source {
                            "" => question,
                            "itself" => question.source(to.ip()),
                            ip => question.source(ip.parse()?),
                        };
                        let packet = Packet::new(question).on_line(at);
                        self.current().packets.push(packet);
                    }
                }
            }
        }
        Ok(())
    }

    /// Puts the values of names into a text; those of addresses are quoted.
    fn filled(&self, text: &str, family: Option<Family>) -> String {
        let mut text = text.to_owned();
        let mut fill =
            |name: String, value: String| text = text.replace(&format!("${name}"), &value);
        for (shift, number) in [
            ("-1", self.number - 1),
            ("+1", self.number + 1),
            ("", self.number),
        ] {
            for (name, at) in [
                ("cluster", At::ClusterIp),
                ("external", At::ExternalIp),
                ("balancer", At::LoadBalancer),
            ] {
                for (digit, family) in [4, 6].into_iter().zip(Family::ALL) {
                    let ip = svc(number).address(at, family, 1).ip();
                    fill(format!("{name}{digit}{shift}"), format!("'{ip}'"));
                }
            }
        }
        let port = svc(self.number).node_port();
        fill("port+1200".to_owned(), (port + 1200).to_string());
        fill("port".to_owned(), port.to_string());
        let Some(family) = family else {
            return text;
        };
        fill("node1".to_owned(), format!("'{}'", node_ip(1, family)));
        fill("node2".to_owned(), format!("'{}'", node_ip(2, family)));
        fill(
            "outside".to_owned(),
            format!("'{}'", Client::Outside.source(family)),
        );
        for pod in ["a", "c"] {
            fill(
                pod.to_owned(),
                format!("'{}'", ep(pod).address(family).ip()),
            );
        }
        text
    }
}

/// Returns the addresses that a word of a line `ask` stands for.
fn addresses(place: &str, number: u16, client: Client) -> Result<Vec<SocketAddr>> {
    if let Ok(to) = place.parse() {
        return Ok(vec![to]);
    }
    let is_name = |c: char| c.is_ascii_alphabetic();
    let (name, port) = place.split_at(place.find(|c| !is_name(c)).unwrap_or(place.len()));
    let kinds = At::ALL
        .into_iter()
        .filter(|at| name == "everywhere" || name == format!("{at:?}"));
    let mut all = Vec::new();
    for (at, family) in kinds.flat_map(|at| Family::ALL.map(|family| (at, family))) {
        let mut to = svc(number).address(at, family, client.node());
        match port.split_at(port.len().min(1)) {
            ("+", more) => to.set_port(to.port() + more.parse::<u16>()?),
            ("=", port) => to.set_port(port.parse()?),
            _ => {}
        }
        all.push(to);
    }
    ensure!(!all.is_empty(), "what is {place}?");
    Ok(all)
}

/// Sets a field, or one of each entry of a list (`*`).
fn set(value: &mut Value, path: &str, new: &Value) {
    let (first, rest) = path.split_once('/').map_or((path, None), |(f, r)| (f, Some(r)));
    let put = |child: &mut Value| match rest {
        Some(rest) => set(child, rest, new),
        None => child.clone_from(new),
    };
    match (value, first.parse::<usize>()) {
        (Value::Array(entries), _) if first == "*" => entries.iter_mut().for_each(put),
        (Value::Array(entries), Ok(at)) => entries.get_mut(at).into_iter().for_each(put),
        (value, _) => put(&mut value[first]),
    }
}
