//! Reading a capture to its end, for commands that print only then.

use std::{
    cell::RefCell,
    io,
    path::Path,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
};

use userdma_proto::dissect::{
    Dissector, Frame, Options,
    capture::{self, Reader},
};

use crate::{
    dissect::stream::{Input, Sink, plain},
    output::counted,
};

/// Exit status of what is no readable capture, or not to its end.
pub(crate) const UNREADABLE: u8 = 2;
/// Exit status after Ctrl-C: 128 and the signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// How reading ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Read {
    /// With the capture.
    Whole,
    /// Before its end, and why.
    Early(String),
    /// By Ctrl-C.
    Interrupted,
}

/// What a file is called.
pub(crate) fn name(file: &Path) -> String {
    if file == Path::new("-") { "stdin".into() } else { file.display().to_string() }
}

/// Gives all frames of a file to `take`, or those until `stop` is raised.
///
/// # Errors
/// It is no capture, in words.
pub(crate) fn read(
    file: &Path,
    roce_ports: &[u16],
    stop: &AtomicBool,
    mut take: impl FnMut(&Frame),
) -> Result<Read, String> {
    let input = Input::open(file)?;
    // Of a pipe nothing is lost: tcpdump ends by the same Ctrl-C, and what it still wrote is read.
    let live = input.is_live();
    // Nothing is printed before the end: there is nothing to flush.
    let sink = Rc::new(RefCell::new(Sink::new(Box::new(io::sink()), false)));
    let mut reader = Reader::new(input.into_read_shown(&sink)).map_err(|e| match e {
        capture::Error::Io(e) => plain(&e),
        e => e.to_string(),
    })?;
    let mut options = Options::default();
    options.roce_ports.extend_from_slice(roce_ports);
    let mut dissector = Dissector::new(options);
    let mut frames = 0;
    let mut drain = |dissector: &mut Dissector| {
        while let Some(frame) = dissector.poll_frame() {
            frames += 1;
            take(&frame);
        }
    };
    let ended = loop {
        match reader.next_record() {
            Ok(Some(record)) => dissector.handle_record(&record),
            Ok(None) => break Ok(Read::Whole),
            Err(capture::Error::Io(e)) => break Err(format!("cannot be read on: {}", plain(&e))),
            Err(e) => break Err(e.to_string()),
        }
        drain(&mut dissector);
        if !live && stop.load(Ordering::Relaxed) {
            break Ok(Read::Interrupted);
        }
    };
    dissector.finish();
    drain(&mut dissector);
    Ok(ended.unwrap_or_else(|why| {
        Read::Early(format!("{why}; {} before that", counted(frames, "frame")))
    }))
}
