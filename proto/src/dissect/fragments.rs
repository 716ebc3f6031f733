//! IP fragments put together.

/// All datagrams that are not whole yet.
#[derive(Debug)]
pub(super) struct Fragments {}
