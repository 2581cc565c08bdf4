use super::*;

use serde::Serialize;

#[derive(Serialize)]
struct Lines(usize);

impl View for Lines {
    fn text(&self, _canvas: &Canvas) -> String {
        (1..=self.0).map(|i| Tone::Good.paint(&format!("line {i}")) + "\n").collect()
    }
}

fn output(format: Format, terminal: fn() -> Option<Size>, watch: bool) -> Output<Vec<u8>> {
    Output {
        writer: Vec::new(),
        format,
        extent: Extent::default(),
        program: "kpctl",
        colour: false,
        terminal,
        unicode: false,
        watch,
        shown: String::new(),
        trouble: String::new(),
    }
}

fn written(output: Output<Vec<u8>>) -> String {
    String::from_utf8(output.writer).unwrap()
}

#[test]
fn a_pipe_gets_block_after_block() {
    let mut output = output(Format::Table, || None, true);
    output.show(&Lines(1)).unwrap();
    output.show(&Lines(2)).unwrap();
    assert_eq!(written(output), "line 1\n\nline 1\nline 2\n");
}

#[test]
fn json_is_one_object_a_line_and_yaml_one_document_each() {
    for (format, expected) in [(Format::Json, "1\n2\n"), (Format::Yaml, "---\n1\n---\n2\n")] {
        // A terminal makes no difference.
        let mut output = output(format, || Some((80, 24)), true);
        output.show(&Lines(1)).unwrap();
        output.show(&Lines(2)).unwrap();
        assert_eq!(written(output), expected);
    }
}

/// A text from outside, in every format for programs.
#[derive(Serialize)]
struct Foreign {
    text: &'static str,
}

impl View for Foreign {
    fn text(&self, _canvas: &Canvas) -> String {
        String::new()
    }

    fn names(&self) -> Option<Vec<String>> {
        Some(vec![self.text.to_owned()])
    }
}

#[test]
fn programs_get_no_characters_that_control_a_terminal_or_reorder_text() {
    let text = "a\u{1b}[2J\u{202e}b\u{9b}c\u{7f}\u{2066}d\u{feff}";
    let template = "jsonpath={.text}".parse().unwrap();
    for format in [Format::Json, Format::Yaml, Format::Name, template] {
        let mut output = output(format.clone(), || Some((80, 24)), false);
        output.show(&Foreign { text }).unwrap();
        let written = written(output);
        let hidden = |c: char| c != '\n' && kplane_model::is_hidden(c);
        assert!(!written.contains(hidden), "{format:?}: {written:?}");
        assert!(written.contains("\\u202eb"), "{format:?}: {written}");
        let read: Option<serde_json::Value> = match format {
            Format::Json => Some(serde_json::from_str(&written).unwrap()),
            Format::Yaml => Some(serde_saphyr::from_str(&written).unwrap()),
            _ => None,
        };
        if let Some(read) = read {
            assert_eq!(read["text"], text, "{format:?}: {written}");
        }
    }
}

#[test]
fn a_terminal_is_drawn_over() {
    let mut output = output(Format::Table, || Some((80, 24)), true);
    output.show(&Lines(2)).unwrap();
    output.show(&Lines(1)).unwrap();
    let expected = "\x1b[2J\x1b[Hline 1\x1b[K\nline 2\x1b[K\n\x1b[J\x1b[Hline 1\x1b[K\n\x1b[J";
    assert_eq!(written(output), expected);
}

#[test]
fn no_more_is_drawn_than_fits() {
    let mut output = output(Format::Table, || Some((80, 5)), true);
    output.show(&Lines(4)).unwrap();
    output.show(&Lines(5)).unwrap();
    let text = written(output);
    assert!(text.contains("line 4"));
    assert!(text.ends_with("line 3\x1b[K\n2 more lines: make the terminal higher\x1b[J"));
    let last = &text[text.rfind(HOME).unwrap()..];
    assert!(last.matches('\n').count() < 5, "the terminal would scroll");
}

#[test]
fn lines_that_the_terminal_breaks_take_more_room() {
    let wide = "0123456789\n".repeat(4);
    assert_eq!(fitting(&wide, 10, 5), (4, 4));
    assert_eq!(fitting(&wide, 9, 9), (4, 4));
    assert_eq!(fitting(&wide, 9, 8), (4, 3));
    assert_eq!(fitting(&wide, 9, 1), (4, 0));
    assert_eq!(fitting("", 9, 1), (0, 0));
}

#[test]
fn trouble_leaves_the_last_picture_on_the_screen() {
    let mut output = output(Format::Table, || Some((80, 24)), true);
    output.show(&Lines(1)).unwrap();
    output.show_trouble("gone").unwrap();
    output.show_trouble("still gone").unwrap();
    let text = written(output);
    let last = &text[text.rfind(HOME).unwrap()..];
    assert!(last.contains("error: still gone; trying again\x1b[K\n"));
    assert_eq!(last.matches("line 1").count(), 1);
}

#[test]
fn a_single_result_is_just_printed() {
    let mut output = output(Format::Table, || Some((80, 24)), false);
    output.colour = true;
    output.show(&Lines(1)).unwrap();
    assert_eq!(written(output), "\x1b[32mline 1\x1b[0m\n");
}
