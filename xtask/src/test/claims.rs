//! Checks that pages that compare kplane with kube-proxy have no other figures than the page of benchmarks.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::figures::{Figure, PAGE, figures, generated};

/// Pages whose sentences about kube-proxy are checked.
const PAGES: [&str; 3] = ["README.md", "docs/choose.md", "docs/introduction.md"];

/// Checks each sentence that names kube-proxy: a number with a unit, such as "19 ms", "99 MiB", "21 times" or "1/89", must be
/// in the generated part of the page of benchmarks.
pub(super) fn check(root: &Path) -> Result<()> {
    let page = std::fs::read_to_string(root.join(PAGE))?;
    let measured = generated(&page).with_context(|| format!("{PAGE} lacks its markers"))?;
    let mut problems = 0;
    for file in PAGES {
        let text = std::fs::read_to_string(root.join(file)).context(file)?;
        for figure in unmeasured(&text, measured) {
            println!("{file}: {figure} beside kube-proxy is not in the table of {PAGE}");
            problems += 1;
        }
    }
    ensure!(problems == 0, "{problems} problems");
    Ok(())
}

/// Returns the figures beside kube-proxy that were not measured.
fn unmeasured(text: &str, measured: &str) -> Vec<String> {
    let measured = figures(measured);
    sentences(text)
        .into_iter()
        .filter(|sentence| sentence.contains("kube-proxy"))
        .flat_map(|sentence| figures(&sentence))
        .filter(|figure| !measured.contains(figure))
        .map(Figure::text)
        .collect()
}

/// Returns the sentences of a text; an item of a list and a row of a table begin one.
fn sentences(text: &str) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with(['*', '|', '#']) {
            paragraphs.push(String::new());
        }
        if let Some(paragraph) = paragraphs.last_mut() {
            *paragraph += &format!("{line} ");
        }
    }
    paragraphs
        .iter()
        .flat_map(|it| it.split_inclusive(". "))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_beside_kube_proxy_must_be_measured() {
        let measured = "| kplane | 19 ms | 99 (101) MiB |\n* using 1/89 of the CPU";
        let text = "# Why\n\nIt starts in 3 s. A change takes 1/89 of what kube-proxy\n1.37 takes, and 19 ms.\n\
                    It has 101 MiB, kube-proxy 310 MiB.\n* kube-proxy: 1/90\n";
        assert_eq!(unmeasured(text, measured), ["310 MiB", "1/90"]);
    }
}
