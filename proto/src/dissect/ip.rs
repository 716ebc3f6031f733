//! IP, and what it carries: UDP, TCP, tunnels.
