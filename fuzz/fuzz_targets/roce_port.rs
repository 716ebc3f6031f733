//! See `userdma_fuzz::roce_port`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(roce_port);
