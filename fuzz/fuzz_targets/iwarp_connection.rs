//! See `userdma_fuzz::iwarp_connection`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(iwarp_connection);
