//! A graph as text for Graphviz (`dot`). Names come from the cluster, so each is quoted.

use std::fmt::Write as _;

use super::model::{Graph, NodeKind};

impl Graph {
    /// Returns the graph in the language of Graphviz, with a line below it.
    pub fn dot(&self, below: &str) -> String {
        let mut out =
            String::from("digraph kplane {\n  rankdir=LR;\n  node [fontname=\"sans-serif\"];\n");
        // Writing to a text does not fail.
        let _ = writeln!(out, "  label={};", quoted(below));
        for (index, node) in self.nodes.iter().enumerate() {
            let shape = match node.kind {
                NodeKind::Client => "ellipse",
                NodeKind::Service => "box",
                NodeKind::Endpoint => "component",
            };
            let label = quoted(&node.label);
            let _ = writeln!(out, "  n{index} [label={label}, shape={shape}];");
        }
        for link in &self.links {
            let colour = if link.failed > 0 { ", color=red" } else { "" };
            let (from, to, label) = (link.from, link.to, quoted(&link.text()));
            let _ = writeln!(out, "  n{from} -> n{to} [label={label}{colour}];");
        }
        out.push_str("}\n");
        out
    }
}

/// Returns a text as a quoted string. A backslash would begin an escape such as `\N`, and a line may not end within quotes.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for of in text.chars() {
        match of {
            '"' | '\\' => out.extend(['\\', of]),
            of if of.is_control() => out.push('?'),
            of => out.push(of),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::super::model::{GraphLink, GraphNode};
    use super::*;

    #[test]
    fn names_stay_within_their_quotes() {
        for (text, expected) in [
            ("shop/web http/TCP", r#""shop/web http/TCP""#),
            (r#"a" -> evil; "b"#, r#""a\" -> evil; \"b""#),
            (r"ends with \", r#""ends with \\""#),
            (r"\N\G", r#""\\N\\G""#),
            ("two\nlines\u{1b}[m", r#""two?lines?[m""#),
            ("", r#""""#),
        ] {
            assert_eq!(quoted(text), expected);
        }
    }

    #[test]
    fn links_have_rates_and_failures() {
        let node = |kind, label: &str| GraphNode {
            kind,
            label: label.to_owned(),
            service: None,
        };
        let graph = Graph {
            nodes: vec![
                node(NodeKind::Client, "shop/cart-1"),
                node(NodeKind::Service, "shop/web http/TCP"),
                node(NodeKind::Endpoint, "shop/web-1"),
            ],
            links: vec![
                GraphLink {
                    from: 0,
                    to: 1,
                    connections: 7_200,
                    per_million_seconds: 2_000_000,
                    ..GraphLink::default()
                },
                GraphLink {
                    from: 1,
                    to: 2,
                    connections: 7_200,
                    failed: 36,
                    per_million_seconds: 2_000_000,
                    ..GraphLink::default()
                },
            ],
        };
        let expected = r#"digraph kplane {
  rankdir=LR;
  node [fontname="sans-serif"];
  label="1 of \"2\"";
  n0 [label="shop/cart-1", shape=ellipse];
  n1 [label="shop/web http/TCP", shape=box];
  n2 [label="shop/web-1", shape=component];
  n0 -> n1 [label="2.00/s"];
  n1 -> n2 [label="2.00/s, 36 (<1%) failed", color=red];
}
"#;
        assert_eq!(graph.dot("1 of \"2\""), expected);
    }
}
