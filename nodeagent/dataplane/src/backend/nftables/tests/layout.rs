//! The whole layout at a glance: `layout.txt`.
//!
//! To change the layout on purpose: run `UPDATE_EXPECT=1 cargo test`, and raise the number in
//! `TABLE_COMMENT`, so that agents of both versions replace each other's table.

use std::fmt::Write as _;

use expect_test::expect_file;

use super::super::layout::chains;
use super::super::schema::{Set, TABLE_COMMENT};

#[test]
fn the_layout_is_the_one_with_this_number() {
    let sets = Set::all().count();
    let rules: usize = chains().iter().map(|chain| chain.rules.len()).sum();
    let mut text = format!("{TABLE_COMMENT}: {sets} sets and maps, {rules} rules\n\n");
    for set in Set::all() {
        writeln!(text, "set {}: {:?}", set.name(), set.fields()).unwrap();
    }
    for chain in chains() {
        writeln!(text, "\nchain {}", chain.name).unwrap();
        if let Some(hook) = chain.hook {
            let (point, priority) = (hook.point, hook.priority);
            writeln!(text, "    {} {point:?} {priority}", hook.chain_type).unwrap();
        }
        let lines: Vec<String> =
            chain.rules.iter().map(|rule| format!("{:?}", rule.steps)).collect();
        for same in lines.chunk_by(|one, next| one == next) {
            let times = match same.len() {
                1 => String::new(),
                n => format!("{n} x "),
            };
            writeln!(text, "    {times}{}", same[0]).unwrap();
        }
    }
    expect_file!["layout.txt"].assert_eq(&text);
}
