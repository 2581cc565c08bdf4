//! Manual pages of programs that write none themselves, made of their help.

use super::recipe::VERSION;

/// Returns the page of a program in roff; `help` is what `--help` prints.
pub(super) fn page(program: &str, help: &str) -> String {
    let (about, rest) = help.split_once("\n\nUsage: ").unwrap_or((help, ""));
    let (usage, rest) = rest.split_once('\n').unwrap_or((rest, ""));
    let about = about.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut page = format!(
        ".TH {program} 8 \"\" \"kplane {VERSION}\"\n.SH NAME\n{program} \\- {}\n.SH SYNOPSIS\n{}\n",
        text(&about),
        text(usage)
    );
    let mut stays = false;
    for line in rest.lines() {
        let words = line.trim();
        if !line.starts_with(' ')
            && let Some(heading) = line.strip_suffix(':')
        {
            stays = AS_THEY_ARE.contains(&heading);
            page += &format!(".fi\n.SH {}\n", text(&heading.to_uppercase()));
            page += if stays { ".nf\n" } else { "" };
        } else if stays {
            page += &format!("{}\n", text(line));
        } else if words.starts_with('-') && line.len() - words.len() <= FLAG {
            page += &format!(".TP\n.B {}\n", text(words));
        } else if words.is_empty() {
            page += ".br\n";
        } else {
            page += &format!("{}\n", text(words));
        }
    }
    page
}

/// Sections whose lines are not filled.
const AS_THEY_ARE: [&str; 3] = ["Commands", "Examples", "Environment"];
/// Largest number of spaces before a flag.
const FLAG: usize = 6;

/// Returns a text in which roff finds no requests.
fn text(words: &str) -> String {
    let words = words.replace('\\', "\\e").replace('-', "\\-");
    if words.starts_with(['.', '\'']) { format!("\\&{words}") } else { words }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const HELP: &str = "\
kplane's agent: programs
desired state

Usage: kp-nodeagent [OPTIONS]

The data path:
      --run-dir <DIR>
          Folder of the socket, such as
          ./run

Examples:
  Serve:
    kp-nodeagent a \\
      --b
";

    #[test]
    fn a_page_has_the_help_and_no_other_requests() {
        let page = page("kp-nodeagent", HELP);
        let expected = format!(
            ".TH kp-nodeagent 8 \"\" \"kplane {VERSION}\"\n.SH NAME\nkp-nodeagent \\- kplane's agent: programs desired \
             state\n.SH SYNOPSIS\nkp\\-nodeagent [OPTIONS]\n.br\n.fi\n.SH THE DATA PATH\n.TP\n.B \\-\\-run\\-dir <DIR>\n\
             Folder of the socket, such as\n\\&./run\n.br\n.fi\n.SH EXAMPLES\n.nf\n  Serve:\n    kp\\-nodeagent a \\e\n      \
             \\-\\-b\n"
        );
        assert_eq!(page, expected);
    }
}
