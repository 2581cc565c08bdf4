//! Bytes as the tools send them, and answers of any shape.
