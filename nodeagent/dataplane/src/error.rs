//! Errors on one line.

use std::error::Error;

/// Returns an error with all its causes, on one line.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Many errors repeat their source in their own text.
        if !line.contains(&cause_text) {
            line.push_str(": ");
            line.push_str(&cause_text);
        }
        source = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_names_every_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("step failed")]
        struct Step(#[source] std::io::Error);
        let error = Step(std::io::Error::other("no buffer space"));
        assert_eq!(chain(&error), "step failed: no buffer space");
    }
}
