//! Classic pcap.
