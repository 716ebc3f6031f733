//! RoCE packets: of a datagram, which may be a whole train, and of a native frame.
