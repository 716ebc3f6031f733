//! MPA start-up frames.

use userdma_proto::wire::{
    Error, Layer,
    iwarp::mpa::{ENHANCED_LEN, MAX_PRIVATE_DATA, START_LEN, Start, legacy_ird_ord},
};

/// The input is a stream. Whatever its front is cut to, the parser says the same, and what it reads
/// goes out again octet for octet.
pub fn mpa_start(data: &[u8]) {
    let all = Start::parse(data);
    check(data, &all);
    // All prefixes that may differ: the frame's longest form, and one octet more.
    let most = data.len().min(START_LEN + MAX_PRIVATE_DATA + 1);
    let mut told = None;
    for len in 0..=most {
        let found = Start::parse(&data[..len]);
        match told {
            None => assert!(found != Ok(None) || len < most || all == Ok(None)),
            // Once something is said it stays, whatever comes behind.
            Some(earlier) => assert_eq!(found, earlier, "{len} octets"),
        }
        if let (None, Ok(Some((_, used)))) = (told, found) {
            assert_eq!(used, len, "a frame is seen as soon as it is whole");
        }
        if found != Ok(None) {
            told = Some(found);
        }
    }
    if let Some(told) = told {
        assert_eq!(told, all);
    }
}

fn check(data: &[u8], found: &Result<Option<(Start<'_>, usize)>, Error>) {
    match found {
        Ok(Some((start, used))) => {
            assert!(*used <= data.len() && *used <= START_LEN + MAX_PRIVATE_DATA);
            let enhanced = if start.enhanced.is_some() { ENHANCED_LEN } else { 0 };
            assert_eq!(*used, START_LEN + enhanced + start.private_data.len());
            let mut out = vec![0xee];
            start.emit(&mut out);
            assert_eq!(out[1..], data[..*used], "{start:?}");
            if let Some((ird, ord)) = legacy_ird_ord(start.private_data) {
                assert!(start.private_data.len() == 8 && ird.max(ord) <= 0x3fff);
            }
        }
        Ok(None) => assert!(data.len() < START_LEN + MAX_PRIVATE_DATA),
        Err(error) => {
            assert_eq!(error.layer, Layer::MpaStart);
            assert!(error.offset < data.len(), "{error}");
            assert!(!error.to_string().is_empty());
        }
    }
}
