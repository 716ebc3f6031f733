//! iWARP over TCP: MPA start-up frames, FPDUs, DDP segments, RDMAP headers.

pub mod ddp;
pub mod fpdu;
pub mod mpa;
pub mod rdmap;
pub mod terminate;
