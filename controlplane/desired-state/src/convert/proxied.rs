//! Conversion of the annotations by which a Service asks for the userspace proxy (`userspace.md`, U50..U53).

use kplane_model::{Protocol, Proxied, Reason};

use super::ports::Port;
use super::report::Report;
use crate::k8s::{CONNECT_RETRY_ANNOTATION, DATA_PATH_ANNOTATION, ObjectMeta, Texts};

/// Returns what a Service asks of the userspace proxy. Each of the two annotations alone asks for it. One that is not
/// understood is reported and counts as missing.
pub(super) fn proxied(
    metadata: &ObjectMeta,
    ports: &[Port],
    report: &mut Report<'_>,
) -> Option<Proxied> {
    let mut reader = Reader {
        annotations: metadata.annotations.as_ref()?,
        report,
        is_asked: false,
    };
    let retry = reader.read(CONNECT_RETRY_ANNOTATION, "true or false", |text| {
        text.parse().ok()
    });
    reader.read(DATA_PATH_ANNOTATION, "userspace", |text| {
        (text == "userspace").then_some(())
    });
    if !reader.is_asked {
        return None;
    }
    if ports.iter().any(|port| port.protocol == Protocol::Sctp) {
        report.warning(
            Reason::InvalidField,
            format!(
                "SCTP ports stay with the kernel, since the userspace proxy does not speak SCTP; the annotations \
                 {DATA_PATH_ANNOTATION} and {CONNECT_RETRY_ANNOTATION} apply to the other ports"
            ),
        );
    }
    let default = Proxied::default();
    Some(Proxied {
        retry: retry.unwrap_or(default.retry),
    })
}

/// A reader of annotations.
struct Reader<'a, 'b> {
    annotations: &'a Texts,
    report: &'a mut Report<'b>,
    /// Whether some annotation was understood.
    is_asked: bool,
}

impl Reader<'_, '_> {
    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text: &str = self.annotations.get(name)?;
        let parsed = parse(text.trim());
        if parsed.is_none() {
            self.report.warning(
                Reason::InvalidField,
                format!("annotation {name} {text:?} is ignored: it must be {expected}"),
            );
        }
        self.is_asked |= parsed.is_some();
        parsed
    }
}
