//! The versions of this program and of the control plane.

use serde::Serialize;

use super::{API_VERSION, View};
use crate::style::Canvas;
use crate::text::{Span, field};

/// The view of `kpctl version`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VersionView {
    api_version: &'static str,
    kind: &'static str,
    client_version: &'static str,
    /// The server's version; `null` when it was not requested.
    server_version: Option<String>,
}

impl VersionView {
    /// Builds the view from this program's version and the server's.
    pub fn new(server_version: Option<String>) -> Self {
        Self {
            api_version: API_VERSION,
            kind: "Version",
            client_version: env!("CARGO_PKG_VERSION"),
            server_version,
        }
    }
}

impl View for VersionView {
    fn text(&self, canvas: &Canvas) -> String {
        let client = field("Client", &[Span::plain(self.client_version)], canvas);
        let server = self.server_version.iter().map(Span::plain);
        let server = field("Control plane", &server.collect::<Vec<_>>(), canvas);
        client + &server
    }
}
