//! pcapng.
