//! See `userdma_fuzz::dissect_file`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(dissect_file);
