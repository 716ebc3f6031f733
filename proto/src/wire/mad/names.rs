//! Names of classes, methods and attributes.

/// Such as `CM`, `SA`, `SMP`.
pub const fn class_name(_class: u8) -> Option<&'static str> {
    unimplemented!()
}

/// Such as `Get`, `GetResp`, `Send`.
pub const fn method_name(_class: u8, _method: u8) -> Option<&'static str> {
    unimplemented!()
}

/// Such as `REQ` (CM), `PathRecord` (SA), `NodeInfo` (SMP).
pub const fn attribute_name(_class: u8, _attribute: u16) -> Option<&'static str> {
    unimplemented!()
}
