//! MPA in a TCP stream: start-up frames, FPDUs, and finding them where the start is missing.
