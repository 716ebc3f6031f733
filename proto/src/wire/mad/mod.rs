//! Management datagrams.

pub mod cm;
mod header;
mod names;

pub use header::{MAD_LEN, MadHeader};
pub use names::{attribute_name, class_name, method_name};

use crate::wire::Error;

/// Management class of the connection manager.
pub const CLASS_CM: u8 = 0x07;
/// Management class of subnet administration.
pub const CLASS_SA: u8 = 0x03;

/// A management datagram: a view.
#[derive(Debug, Clone, Copy)]
pub struct Mad<'a> {
    /// The header of 24 octets.
    pub header: &'a MadHeader,
    /// What follows it: 232 octets in a whole MAD.
    pub body: &'a [u8],
}

impl<'a> Mad<'a> {
    /// Splits a MAD.
    ///
    /// # Errors
    ///
    /// Truncated, if the header is not whole.
    pub fn parse(_octets: &'a [u8]) -> Result<Self, Error> {
        unimplemented!()
    }

    /// The connection manager's message in it; `None` for another class, or an attribute that
    /// names none.
    ///
    /// # Errors
    ///
    /// Truncated, if the body is not whole.
    pub fn cm(&self) -> Result<Option<cm::Message<'a>>, Error> {
        unimplemented!()
    }
}
