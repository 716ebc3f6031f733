//! What several objects use at a time.

/// Things, and of each how many use it; forgotten with the last user. They are few at a time, for
/// which a list does.
pub(crate) struct Users<T>(Vec<(T, usize)>);

impl<T> Users<T> {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// One more uses the thing that `is` knows, which is made where it is new.
    pub(crate) fn add(&mut self, is: impl Fn(&T) -> bool, make: impl FnOnce() -> T) {
        match self.0.iter_mut().find(|(thing, _)| is(thing)) {
            Some((_, users)) => *users += 1,
            None => self.0.push((make(), 1)),
        }
    }

    /// One less uses the thing that `is` knows.
    pub(crate) fn remove(&mut self, is: impl Fn(&T) -> bool) {
        if let Some(i) = self.0.iter().position(|(thing, _)| is(thing)) {
            self.0[i].1 -= 1;
            if self.0[i].1 == 0 {
                self.0.swap_remove(i);
            }
        }
    }

    pub(crate) fn get(&self, i: usize) -> Option<&T> {
        self.0.get(i).map(|(thing, _)| thing)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(thing, _)| thing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thing_is_kept_as_long_as_somebody_uses_it() {
        let mut users = Users::new();
        for n in [7, 8, 7] {
            users.add(|&known| known == n, || n);
        }
        assert_eq!((users.len(), users.get(1)), (2, Some(&8)));
        users.remove(|&known| known == 9);
        users.remove(|&known| known == 7);
        assert!(users.iter().eq(&[7, 8]));
        users.remove(|&known| known == 7);
        assert!(users.iter().eq(&[8]));
        users.remove(|&known| known == 8);
        assert!(users.is_empty() && users.get(0).is_none());
    }
}
