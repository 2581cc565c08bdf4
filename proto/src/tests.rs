//! Comparisons of the API with files: its page in `docs/`, the messages of the last release, and the descriptors of all releases.

mod api_page;
mod golden;
mod released;
