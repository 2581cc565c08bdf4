//! Two habits that make code longer to read, and that no lint finds. The checks read formatted text, line by line.

/// This file, which quotes what it refuses.
pub(super) const FILE: &str = file!();

/// What to write instead of a half-chain.
const CHAIN: &str = "the binding before only breaks a chain in two: write one chain";

/// What to write instead of a filter that ignores the value.
const CONDITION: &str = "`filter(|_| ..)` on an Option: write the condition in an `if`";

/// Methods that make an iterator or change one, and do nothing else.
const LAZY: &str = "iter iter_mut into_iter keys values lines chars drain map filter filter_map flat_map flatten chain zip \
                    enumerate cloned copied";

/// Methods whose result may borrow from a value that needs a binding of its own.
const BORROWING: &str = "iter iter_mut keys values lines chars bytes split split_once split_whitespace strip_prefix trim get \
                         first as_ref as_mut as_deref as_str by_ref";

/// Signs of an iterator. A filter of one may well ignore the items.
const ITERATORS: [&str; 7] = [
    "iter()", "..", "lines()", "chars()", "keys()", "values()", "drain(",
];

/// Returns the numbers of the lines that have a habit, and what to write instead.
pub(super) fn found(text: &str) -> Vec<(usize, &'static str)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for at in 1..lines.len() {
        if is_half_chain(&lines, at).unwrap_or(false) {
            found.push((at + 1, CHAIN));
        }
        if is_condition(&lines, at) {
            found.push((at + 1, CONDITION));
        }
    }
    found
}

/// Returns whether a statement begins with what the statement before it binds for nothing else. Either both bind the same
/// name, or the first binds an iterator and the second is the value of a block.
fn is_half_chain(lines: &[&str], at: usize) -> Option<bool> {
    lines[at - 1].strip_suffix(';')?;
    let end = (at + 1..lines.len()).find(|n| begins(lines, *n, at))?;
    let second = lines[at..end].join("\n");
    let second = second.trim_start();
    let (bound, value) = match second.strip_prefix("let ") {
        Some(binding) => {
            let (pattern, value) = binding.split_once(" =")?;
            (Some(name(pattern.trim_start_matches("mut "))), value)
        }
        None => (None, second),
    };
    let receiver = name(value.trim_start());
    let (_, call) = value.split_once(receiver)?;
    let call = call.trim_start_matches('?').trim_start();
    let method = name(call.strip_prefix('.')?);
    let is_once = words(value).filter(|word| *word == receiver).count() == 1;

    let start = (0..at).rev().find(|n| begins(lines, *n, at))?;
    let first = lines[start..at].join("\n");
    let binding = first.trim_start().strip_prefix("let ")?;
    let (pattern, made) = binding.split_once(" = ")?;
    let is_bound = pattern.trim_start_matches("mut ") == receiver;
    let is_habit = match bound {
        Some(bound) => bound == receiver && is_chain(made) && !has(BORROWING, method),
        None => {
            let is_last = indent(lines[end]) < indent(lines[at]) && !second.ends_with(';');
            is_last && last_method(made).is_some_and(|last| has(LAZY, last))
        }
    };
    Some(is_once && is_bound && is_habit)
}

/// Returns whether a filter ignores the value although it is no iterator's.
fn is_condition(lines: &[&str], at: usize) -> bool {
    let filter = [".filter(|_| ", ".filter(move |_| "];
    let Some(column) = filter.iter().find_map(|filter| lines[at].find(filter)) else {
        return false;
    };
    let start = (0..=at).rev().find(|n| begins(lines, *n, at)).unwrap_or(at);
    let before = lines[start..at].join("\n") + &lines[at][..column];
    !ITERATORS.iter().any(|sign| before.contains(sign))
}

/// Returns whether a line begins a statement, or ends a block, at most as deep as another line.
fn begins(lines: &[&str], n: usize, at: usize) -> bool {
    let goes_on = lines[n].trim_start().starts_with(['.', ')', ']', '}']) || lines[n].is_empty();
    indent(lines[n]) < indent(lines[at]) || indent(lines[n]) == indent(lines[at]) && !goes_on
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

fn has(list: &str, word: &str) -> bool {
    words(list).any(|one| one == word)
}

/// Returns the name with which a text begins.
fn name(text: &str) -> &str {
    words(text).next().unwrap_or_default()
}

/// Returns whether a value may stand before a call: it is no block and has no operator in front.
fn is_chain(value: &str) -> bool {
    let blocks = ["match", "if", "unsafe", "async", "loop"];
    !blocks.contains(&name(value)) && !value.starts_with(['*', '&', '|', '!'])
}

/// Returns the method that a chain calls last.
fn last_method(chain: &str) -> Option<&str> {
    let chain = chain.strip_suffix(");")?;
    let mut depth = 1;
    let open = chain.rfind(|c| {
        match c {
            ')' | ']' | '}' => depth += 1,
            '(' | '[' | '{' => depth -= 1,
            _ => {}
        }
        depth == 0
    })?;
    let (_, method) = chain[..open].rsplit_once('.')?;
    Some(name(method))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(text: &str) -> Vec<usize> {
        found(text).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn two_bindings_of_one_name_are_one_chain() {
        let halves =
            "    let ports = ports.filter(open);\n    let ports: Vec<_> = ports.collect();\n";
        assert_eq!(found(&format!("fn f() {{\n{halves}}}\n")), [(3, CHAIN)]);
        let long = "fn f() {\n    let read = each(|path| {\n        path.read();\n    });\n    let read = read\n        .map(at);\n}\n";
        assert_eq!(numbers(long), [5]);
        let used_twice =
            "fn f() {\n    let node = node();\n    let node = node.at(node.number);\n}\n";
        assert!(numbers(used_twice).is_empty());
        let borrowed = "fn f() {\n    let text = format!(\"a\");\n    let text = text.trim();\n}\n";
        assert!(numbers(borrowed).is_empty());
    }

    #[test]
    fn an_iterator_is_not_bound_for_the_value_of_a_block() {
        let value = "fn f() {\n    let nodes = fleet.nodes.iter();\n    nodes\n        .map(name)\n        .collect()\n}\n";
        assert_eq!(found(value), [(3, CHAIN)]);
        let statement =
            "fn f() {\n    let nodes = nodes.iter();\n    nodes.for_each(drop);\n    done()\n}\n";
        assert!(numbers(statement).is_empty());
        let named = "fn f() {\n    let port = listen()?.port();\n    port.to_string()\n}\n";
        assert!(numbers(named).is_empty());
    }

    #[test]
    fn a_filter_of_an_option_looks_at_the_value() {
        let option = "fn f() {\n    let last = ports.last().filter(|_| more);\n}\n";
        assert_eq!(found(option), [(2, CONDITION)]);
        let broken = "fn f() {\n    node.as_ref()\n        .filter(|_| is_agent)\n}\n";
        assert_eq!(numbers(broken), [3]);
        let iterator = "fn f() {\n    (0..9)\n        .filter(|_| dice.roll(3) == 0)\n}\n";
        assert!(numbers(iterator).is_empty());
    }
}
