//! Captures as records in memory, which tests leave out, cut short and put in another order.

use std::{fs::File, iter, path::Path};

use userdma_proto::dissect::{
    Dissector, Frame, Options,
    capture::{Error, LinkType, Reader, Record},
};

/// One record of a capture, owned.
#[derive(Debug, Clone)]
pub struct Octets {
    /// How it begins.
    pub link: LinkType,
    /// ERF's record type.
    pub erf: Option<u8>,
    /// When, in nanoseconds since 1970.
    pub time_ns: Option<i128>,
    /// Octets on the wire.
    pub len: u32,
    /// What was captured.
    pub data: Vec<u8>,
}

impl Octets {
    /// The record, of which no more than `snaplen` octets were captured.
    pub fn record(&self, number: u64, snaplen: usize) -> Record<'_> {
        let data = &self.data[..self.data.len().min(snaplen)];
        Record {
            number,
            time_ns: self.time_ns,
            len: self.len,
            data,
            link: self.link,
            erf: self.erf,
        }
    }
}

/// The records of a file.
///
/// # Errors
/// It is no capture that can be read to its end.
pub fn records(path: &Path) -> Result<Vec<Octets>, Error> {
    let mut reader = Reader::new(File::open(path)?)?;
    let mut out = Vec::new();
    while let Some(Record { time_ns, link, erf, len, data, .. }) = reader.next_record()? {
        out.push(Octets { link, erf, time_ns, len, data: data.to_vec() });
    }
    Ok(out)
}

/// The frames of these records, cut to `snaplen` octets: as many, and numbered from 1.
pub fn dissect<'a>(records: impl IntoIterator<Item = &'a Octets>, snaplen: usize) -> Vec<Frame> {
    let mut dissector = Dissector::new(Options::default());
    let (mut frames, mut count) = (Vec::new(), 0);
    for octets in records {
        count += 1;
        dissector.handle_record(&octets.record(count, snaplen));
        frames.extend(iter::from_fn(|| dissector.poll_frame()));
    }
    dissector.finish();
    frames.extend(iter::from_fn(|| dissector.poll_frame()));
    assert!(frames.iter().map(|frame| frame.number).eq(1..=count), "frames in their order");
    frames
}
