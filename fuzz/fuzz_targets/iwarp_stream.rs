//! See `userdma_fuzz::iwarp_stream`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(iwarp_stream);
