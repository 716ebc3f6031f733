//! The fuzz targets over their committed inputs: seeds, and what once found something. Here the
//! checksums are checked; under `cargo fuzz` they count as good.

use userdma_fuzz::{TARGETS, replay};

macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                println!("{} inputs", replay(stringify!($name), userdma_fuzz::$name));
            }
        )*

        #[test]
        fn every_target_is_here() {
            assert_eq!(TARGETS.map(|(name, _)| name), [$(stringify!($name)),*]);
        }
    };
}

targets!(
    cm_mad dissect_file encode_decode iwarp_connection iwarp_stream mpa_start roce_cm roce_packet
    roce_port roce_qp
);
