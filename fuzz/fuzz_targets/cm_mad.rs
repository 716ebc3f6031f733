//! See `userdma_fuzz::cm_mad`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(cm_mad);
