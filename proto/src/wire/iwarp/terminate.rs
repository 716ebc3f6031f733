//! skeleton
/// A Terminate, owned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminate { }
