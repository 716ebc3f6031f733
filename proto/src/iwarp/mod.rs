//! One iWARP connection without I/O: MPA start-up, DDP queues, RDMAP operations.
//!
//! A driver owns the TCP socket and both buffers. After any input it drains the outputs:
//!
//! ```text
//! loop {
//!     input:   handle_stream(octets of the socket)   handle_eof / handle_reset   handle_timeout
//!              post_send / post_recv / accept / reject / close / abort
//!     output:  while poll_transmit(...) { write the parts, handle_written(n) }
//!              poll_shutdown → shut the socket down
//!              poll_completion → completion queues
//!              poll_event → the program
//!              poll_timeout → arm a timer for handle_timeout
//! }
//! ```

mod connection;
mod receive;
mod send;
mod startup;
mod transmit;
mod types;

pub use connection::Connection;
pub use transmit::{Part, Transmit};
pub use types::{
    CloseReason, Completion, Config, Established, Event, MpaOptions, Request, Role, RtrKinds,
    Shutdown, StartupError, Stats,
};
