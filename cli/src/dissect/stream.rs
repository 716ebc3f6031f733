//! What is read, and where lines go.

use std::{
    cell::RefCell,
    env,
    fs::File,
    io::{self, IsTerminal, Read, Write},
    path::Path,
    rc::Rc,
    sync::{
        Arc,
        atomic::AtomicBool,
        mpsc::{self, Receiver, Sender},
    },
};

use clap::ColorChoice;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::line::Line;

/// Octets of lines that are kept before they go out.
const ENOUGH: usize = 64 << 10;

/// From this size on a file is worth a progress bar.
const LARGE: u64 = 16 << 20;

/// An opened capture.
pub(crate) enum Input {
    /// A file with an end: it can be read to it at any time.
    File(File, u64),
    /// A pipe, a socket, a device: more may come, and somebody waits for what is there already.
    Live(Box<dyn Read>),
}

impl Input {
    /// Opens a file, or stdin for `-`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, and what to do, in words.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        if path == Path::new("-") {
            return Self::stdin();
        }
        let file = File::open(path).map_err(|e| plain(&e))?;
        let metadata = file.metadata().map_err(|e| plain(&e))?;
        if metadata.is_dir() {
            return Err("is a directory, not a capture".into());
        }
        Ok(if metadata.is_file() {
            Self::File(file, metadata.len())
        } else {
            Self::Live(Box::new(file))
        })
    }

    fn stdin() -> Result<Self, String> {
        if io::stdin().is_terminal() {
            return Err("this is a terminal; send a capture into it, such as \
                        `tcpdump -U -w - port 4791 | userdma dissect -`"
                .into());
        }
        #[cfg(unix)]
        {
            use std::os::fd::AsFd;

            let fd = io::stdin().as_fd().try_clone_to_owned().map_err(|e| plain(&e))?;
            let file = File::from(fd);
            match file.metadata() {
                Ok(metadata) if metadata.is_file() => Ok(Self::File(file, metadata.len())),
                Ok(metadata) if metadata.is_dir() => Err("is a directory, not a capture".into()),
                _ => Ok(Self::Live(Box::new(file))),
            }
        }
        #[cfg(not(unix))]
        Ok(Self::Live(Box::new(io::stdin())))
    }

    pub(crate) fn is_live(&self) -> bool {
        matches!(self, Self::Live(_))
    }

    /// A reader of it for a command that prints only at the end: how far it is can be shown on a terminal.
    pub(crate) fn into_read_shown(self, sink: &Rc<RefCell<Sink>>) -> Box<dyn Read> {
        match self {
            Self::File(file, len) if len > LARGE && io::stderr().is_terminal() => {
                Box::new(Ahead::new(progress(len).wrap_read(file)))
            }
            other => other.into_read(sink),
        }
    }

    /// A reader of it. Of a live input it sends out what `sink` has before it waits for more; of a
    /// large file it shows how far it is.
    pub(crate) fn into_read(self, sink: &Rc<RefCell<Sink>>) -> Box<dyn Read> {
        match self {
            Self::Live(input) => Box::new(Flushing { input, sink: Rc::clone(sink) }),
            Self::File(file, len)
                if len > LARGE && io::stderr().is_terminal() && !io::stdout().is_terminal() =>
            {
                Box::new(Ahead::new(progress(len).wrap_read(file)))
            }
            Self::File(file, len) if len > LARGE => Box::new(Ahead::new(file)),
            Self::File(file, _) => Box::new(file),
        }
    }
}

/// Raised by the first Ctrl-C; the second one ends the process.
pub(crate) fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    use signal_hook::{consts::SIGINT, flag};

    let stop = Arc::new(AtomicBool::new(false));
    // In this order: at the first signal the flag is not up yet.
    flag::register_conditional_shutdown(SIGINT, super::INTERRUPTED.into(), Arc::clone(&stop))?;
    flag::register(SIGINT, Arc::clone(&stop))?;
    Ok(stop)
}

/// Whether text on stdout shall have colours.
pub(crate) fn shows_colours(choice: ColorChoice) -> bool {
    match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => {
            let set = |name| env::var_os(name).filter(|value| !value.is_empty());
            io::stdout().is_terminal()
                && set("NO_COLOR").is_none()
                && set("TERM").is_none_or(|term| term != "dumb")
        }
    }
}

/// An error without the number that std prints behind it.
pub(crate) fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        _ => error.to_string(),
    }
}

fn progress(len: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr());
    let style = "{wide_bar} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
    // The template is constant and valid; were it not, the default would do.
    bar.with_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()))
        .with_finish(indicatif::ProgressFinish::AndClear)
}

/// Reads ahead in a thread of its own: to copy a large file out of the kernel takes as long as to decode it.
struct Ahead {
    full: Receiver<io::Result<Vec<u8>>>,
    empty: Sender<Vec<u8>>,
    chunk: Vec<u8>,
    at: usize,
}

impl Ahead {
    const CHUNK: usize = 1 << 20;
    const CHUNKS: usize = 4;

    fn new(mut input: impl Read + Send + 'static) -> Self {
        let (to_reader, full) = mpsc::channel();
        let (empty, to_thread) = mpsc::channel::<Vec<u8>>();
        for _ in 0..Self::CHUNKS {
            let _ = empty.send(Vec::new());
        }
        // It ends with the file, or when nobody reads any more.
        std::thread::spawn(move || {
            while let Ok(mut chunk) = to_thread.recv() {
                chunk.resize(Self::CHUNK, 0);
                let read = loop {
                    match input.read(&mut chunk) {
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        read => break read,
                    }
                };
                let ends = !matches!(read, Ok(1..));
                let sent = to_reader.send(read.map(|octets| {
                    chunk.truncate(octets);
                    chunk
                }));
                if ends || sent.is_err() {
                    return;
                }
            }
        });
        Self { full, empty, chunk: Vec::new(), at: 0 }
    }
}

impl Read for Ahead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.chunk.len() {
            // The thread is gone behind the end, and behind an error.
            let Ok(next) = self.full.recv() else { return Ok(0) };
            let used = std::mem::replace(&mut self.chunk, next?);
            self.at = 0;
            let _ = self.empty.send(used);
        }
        let octets = buffer.len().min(self.chunk.len() - self.at);
        buffer[..octets].copy_from_slice(&self.chunk[self.at..self.at + octets]);
        self.at += octets;
        Ok(octets)
    }
}

struct Flushing {
    input: Box<dyn Read>,
    sink: Rc<RefCell<Sink>>,
}

impl Read for Flushing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.sink.borrow_mut().flush() {
            return Err(io::Error::other("the output is gone"));
        }
        self.input.read(buffer)
    }
}

/// Lines on their way out.
pub(crate) struct Sink {
    /// What was not yet sent; append here.
    pub(crate) lines: Line,
    output: Box<dyn Write>,
    failure: Option<io::Error>,
}

impl Sink {
    pub(crate) fn new(output: Box<dyn Write>, colours: bool) -> Self {
        Self { lines: Line::new(colours), output, failure: None }
    }

    /// To be called behind each line. Whether the output can still be written to.
    #[inline]
    pub(crate) fn end_line(&mut self) -> bool {
        self.lines.as_bytes().len() < ENOUGH || self.flush()
    }

    /// Sends everything out. Whether that worked, and all before it.
    pub(crate) fn flush(&mut self) -> bool {
        if self.failure.is_none() {
            let lines = self.lines.as_bytes();
            let sent = self.output.write_all(lines).and_then(|()| self.output.flush());
            self.failure = sent.err();
        }
        self.lines.clear();
        self.failure.is_none()
    }

    /// Why the output could not be written to.
    pub(crate) fn failure(&self) -> Option<&io::Error> {
        self.failure.as_ref()
    }
}
