//! What a commit makes worth looking at, which flows are stale, and when to look.
