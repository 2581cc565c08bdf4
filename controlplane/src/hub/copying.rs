//! Copies of the index, for questions that begin with "what if".

use super::{Closing, Hub, Query};
use crate::index::Index;

impl Hub {
    /// Returns a copy of the index; `None` at a relay. Changes wait while it is made.
    ///
    /// # Errors
    /// [`Closing`].
    pub(crate) async fn copy(&self) -> Result<Option<Box<Index>>, Closing> {
        self.ask(Query::Copy).await
    }
}
