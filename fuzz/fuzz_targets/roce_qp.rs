//! See `userdma_fuzz::roce_qp`.
#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(roce_qp);
