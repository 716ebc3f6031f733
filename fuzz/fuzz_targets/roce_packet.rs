//! See `userdma_fuzz::roce_packet`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(roce_packet);
