//! See `userdma_fuzz::encode_decode`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(encode_decode);
