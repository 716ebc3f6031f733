//! See `userdma_fuzz::mpa_start`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(mpa_start);
