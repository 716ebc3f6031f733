#![cfg_attr(fuzzing, no_main)]
userdma_fuzz::target!(iwarp_connection);
