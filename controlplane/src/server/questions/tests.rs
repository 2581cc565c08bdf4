//! Questions to agents.
