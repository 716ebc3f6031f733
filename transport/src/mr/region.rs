//! Memory on its way to be registered.

use super::{RegisterError, raw::Backing};

/// Memory to register with a protection domain: owned pages, or a buffer that is lent.
///
/// Foreign memory comes in by [`Table::register_foreign`](super::Table::register_foreign).
#[derive(Debug)]
pub struct Region(Backing);

impl Region {
    /// `len` zeroed octets that start at a page of 4096.
    ///
    /// # Errors
    /// [`RegisterError::Empty`] for a length of 0, [`RegisterError::NoMemory`] where the system
    /// does not have as much.
    pub fn alloc(len: usize) -> Result<Self, RegisterError> {
        Backing::pages(len).map(Self)
    }

    /// Takes the buffer over: the `vec.len()` octets in it become the region.
    /// [`Mr::into_vec`](super::Mr::into_vec) gives it back. An empty buffer is refused when it is
    /// registered.
    pub fn from_vec(vec: Vec<u8>) -> Self {
        Self(Backing::vec(vec))
    }

    /// Length in octets.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no octets, so that it cannot be registered.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) const fn new(backing: Backing) -> Self {
        Self(backing)
    }

    pub(super) fn into_backing(self) -> Backing {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::raw::PAGE;

    #[test]
    fn alloc_is_zeroed_and_page_aligned() {
        for len in [1, 7, 8, PAGE - 1, PAGE, PAGE + 1, 1 << 20] {
            let region = Region::alloc(len).unwrap();
            assert_eq!(region.len(), len);
            let held = region.0.enter().unwrap();
            assert_eq!(held.words().at(0).addr() % PAGE, 0);
            let mut octets = Vec::new();
            held.words().load_to_vec(0, len, &mut octets);
            assert!(octets.iter().all(|octet| *octet == 0));
        }
    }

    #[test]
    fn impossible_lengths_are_errors() {
        assert!(matches!(Region::alloc(0), Err(RegisterError::Empty)));
        for len in [usize::MAX, isize::MAX as usize, isize::MAX as usize - PAGE, 1 << 60] {
            match Region::alloc(len) {
                Err(RegisterError::NoMemory { len: told }) => assert_eq!(told, len),
                other => panic!("{len}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_buffer_that_is_not_registered_is_freed_whole() {
        // The sanitizers' business: length and capacity differ.
        let mut vec = Vec::with_capacity(100);
        vec.extend_from_slice(&[1, 2, 3]);
        assert_eq!(Region::from_vec(vec).len(), 3);
        assert!(Region::from_vec(Vec::new()).is_empty());
    }
}
