//! See `userdma_fuzz::roce_cm`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(roce_cm);
