//! What there is to be found, once: identifier, severity, meaning, what to look at, and the rule.

use core::fmt;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Worth saying; nothing is wrong with it.
    Note,
    /// It works, but something is wrong or costs time.
    Warning,
    /// An operation or a connection failed.
    Error,
}

impl Severity {
    /// `note`, `warning` or `error`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $id:literal $severity:ident $meaning:literal $look:literal $rule:literal;)*) => {
        /// A kind of finding. Its identifier is stable.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Kind {
            $(#[doc = $meaning] $name,)*
        }

        impl Kind {
            /// All of them, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Such as `RC-PSN-GAP`.
            pub const fn id(self) -> &'static str {
                match self { $(Self::$name => $id),* }
            }

            /// How bad it is.
            pub const fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity),* }
            }

            /// What it means, in a sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning),* }
            }

            /// What to look at, or to do.
            pub const fn look_at(self) -> &'static str {
                match self { $(Self::$name => $look),* }
            }

            /// Where the rule stands.
            pub const fn rule(self) -> &'static str {
                match self { $(Self::$name => $rule),* }
            }
        }
    };
}

kinds! {
    RoceIcrcBad "ROCE-ICRC-BAD" Error
        "The ICRC of a RoCE packet is wrong, and no single rewritten field explains it: the packet was damaged between the sender's adapter and the capture."
        "Memory, cables and devices between sender and capture point; a capture on the sending host may show packets before the adapter has filled the ICRC in."
        "IBTA vol. 1, 7.8.1; Annex A17";
    RoceIcrcRewrite "ROCE-ICRC-REWRITE" Error
        "The ICRC of a RoCE packet is wrong, but right with one field put back: something on the way rewrites that field, or the sender covers a field that it must not."
        "Whatever rewrites the named field: NAT, a firewall that normalises the IPv4 Identification, a router in front of a sender that covers TTL or DSCP."
        "IBTA Annex A17.3";
    IwCrcBad "IW-CRC-BAD" Error
        "The CRC32c of an FPDU is wrong on a stream whose start-up turned the CRC on."
        "Memory, offloads and middleboxes that rewrite TCP payloads; TCP's own checksum was right, or the segment would have been dropped."
        "RFC 5044 §7.1.1";
    RcPsnGap "RC-PSN-GAP" Warning
        "Request packets are missing in front of this one, and never came late: they were lost before the capture point."
        "Drops at the sender's adapter, and at switches between it and the capture point; PFC and buffer settings."
        "IBTA vol. 1, 9.7.1";
    RcRespGap "RC-RESP-GAP" Warning
        "READ response or ATOMIC ACK packets are missing in front of this one, and never came late: lost on the way from the responder to the capture point."
        "Drops between the responder's adapter and the capture point."
        "IBTA vol. 1, 9.7.5.1";
    RcDuplicate "RC-DUPLICATE" Warning
        "The network delivered the same packet twice: it is no resend of the sender."
        "Loops, mirrored ports that the capture sees twice, bonding in broadcast mode."
        "IBTA vol. 1, 9.7.5.1";
    RcReorder "RC-REORDER" Warning
        "A packet came after one that was sent later. Nothing was lost, but most responders treat it as a loss."
        "Load balancing by packet instead of by flow, bonding in round-robin mode; the UDP source port must be the same for all packets of a queue pair."
        "IBTA vol. 1, 9.7.1";
    RcRetransmit "RC-RETRANSMIT" Warning
        "The requester sent packets again."
        "The cause in the sentence: after a NAK the loss before it, after a time-out why no answer came, or whether the time-out is too short."
        "IBTA vol. 1, 9.7.5.1, 9.9.2";
    RcRetryStorm "RC-RETRY-STORM" Warning
        "The same packets were sent again three times or more without progress."
        "Whether the responder gets them at all (its own capture, its counters), and whether its answers come back."
        "IBTA vol. 1, 9.9.2";
    RcRetryExhausted "RC-RETRY-EXHAUSTED" Error
        "The requester gave up: it used the retries that the connection allows without an answer."
        "Whether the responder was alive; retry_cnt and the ACK time-out."
        "IBTA vol. 1, 9.9.2";
    RcNakSeq "RC-NAK-SEQ" Warning
        "NAK, PSN sequence error (0x60): the responder names the PSN that it expected."
        "The loss or the reordering in front of it."
        "IBTA vol. 1, 9.7.5.2";
    RcNakInvalid "RC-NAK-INVALID" Error
        "NAK, invalid request (0x61): a shape, opcode or length that the responder does not take. The connection is over."
        "The request named: an operation that was not enabled, a SEND longer than the receive posted for it, too many READs, a length beyond the RETH's."
        "IBTA vol. 1, 9.7.5.2";
    RcNakAccess "RC-NAK-ACCESS" Error
        "NAK, remote access error (0x62): wrong R_Key, rights or bounds. The connection is over."
        "Address, length and R_Key of the request named against what the responder registered, and whether it deregistered too early."
        "IBTA vol. 1, 9.7.5.2";
    RcNakOp "RC-NAK-OP" Error
        "NAK, remote operational error (0x63): the responder itself failed. The connection is over."
        "The responder's completion queue and its log; Linux's rxe says so of a receive that is too small."
        "IBTA vol. 1, 9.7.5.2";
    RcNakOther "RC-NAK-OTHER" Error
        "A NAK of another code: invalid RD request, or reserved."
        "The responder's implementation."
        "IBTA vol. 1, 9.7.5.2";
    RcRnr "RC-RNR" Warning
        "RNR NAK: no receive was posted; all waits for the time that it asks for."
        "How many receives the responder posts, and when; min_rnr_timer."
        "IBTA vol. 1, 9.7.5.2";
    RcRnrEarly "RC-RNR-EARLY" Note
        "The RNR NAK answers the first messages of the connection: receives are posted late."
        "Post receives before the connection is accepted."
        "IBTA vol. 1, 12.9.7";
    RcRnrExhausted "RC-RNR-EXHAUSTED" Error
        "More RNR NAKs of one PSN than the rnr_retry of the connection allows: the requester gave up."
        "The responder's receives; rnr_retry 7 stands for no limit."
        "IBTA vol. 1, 9.7.5.2";
    RcRecvTooSmall "RC-RECV-TOO-SMALL" Note
        "A SEND drew NAK 0x61 or 0x63: a hint that it was longer than the receive posted for it."
        "The size of the responder's receives against the SEND's."
        "IBTA vol. 1, 9.7.5.2";
    RcOutstanding "RC-OUTSTANDING" Error
        "More READs and ATOMICs were outstanding than the connection allows."
        "initiator_depth and responder_resources of both ends."
        "IBTA vol. 1, 9.4.5, 12.7.29";
    RcAckReqUnanswered "RC-ACKREQ-UNANSWERED" Warning
        "A packet that asked for an ACK never got one, directly or by a later ACK, NAK or response, though the capture and the connection went on."
        "Whether the other direction is in the capture, and whether the responder is alive."
        "IBTA vol. 1, 9.7.5.1";
    FlowStalled "FLOW-STALLED" Warning
        "A flow fell silent with work outstanding, and did not recover."
        "The end that went silent."
        "IBTA vol. 1, 9.9.2";
    UcPsnGap "UC-PSN-GAP" Warning
        "Packets of an unreliable connection are missing: the message is lost, nobody resends it."
        "Drops between the sender and the capture point."
        "IBTA vol. 1, 9.8.2";
    UcDuplicate "UC-DUPLICATE" Warning
        "The network delivered a packet of an unreliable connection twice."
        "Loops, mirrored ports that the capture sees twice."
        "IBTA vol. 1, 9.8.2";
    UcReorder "UC-REORDER" Warning
        "Packets of an unreliable connection came in another order than they were sent: the receiver drops the message."
        "Load balancing by packet."
        "IBTA vol. 1, 9.8.2";
    EcnMarked "ECN-MARKED" Note
        "Packets came with CE set: a switch on the way was congested."
        "ECN thresholds, and who shares the port."
        "RFC 3168 §5; IBTA Annex A17.9";
    EcnNoCnp "ECN-NO-CNP" Warning
        "CE-marked packets drew no CNP from their receiver."
        "Whether the receiver has congestion control on for that priority, and whether CNPs are dropped on the way."
        "IBTA Annex A17.9";
    CnpSeen "CNP-SEEN" Note
        "A CNP asks the sender of a flow to slow down."
        "The switch that marked the flow's packets."
        "IBTA Annex A17.9";
    CnpNoSlowdown "CNP-NO-SLOWDOWN" Warning
        "The sender went on at the same rate after CNPs."
        "Whether the sender reacts to CNPs on that priority."
        "IBTA Annex A17.9";
    PfcPause "PFC-PAUSE" Warning
        "Pause frames: a priority, or the whole link, was stopped."
        "Who is slow behind the sender of these frames; a stuck receiver can stop a whole fabric."
        "IEEE 802.1Qbb; IEEE 802.3 annex 31B";
    QosDscpMismatch "QOS-DSCP-MISMATCH" Warning
        "The two directions of a flow carry different DSCP values: one of them may not be lossless."
        "traffic_class and the mapping to priorities on both ends."
        "IBTA Annex A17.4.5";
    QosPcpMismatch "QOS-PCP-MISMATCH" Warning
        "The two directions of a flow carry different VLAN priorities."
        "The mapping to priorities on both ends."
        "IEEE 802.1Q";
    RoceWrongQp "ROCE-WRONG-QP" Error
        "Packets that continue a connection's numbers go to a queue pair that the connection does not have."
        "The queue pair number that the sender was told."
        "IBTA vol. 1, 9.6.1.1";
    RocePkey "ROCE-PKEY" Error
        "The P_Key is not that of the connection, or both ends are limited members of its partition."
        "The partition tables of both ends."
        "IBTA vol. 1, 9.6.1.1, 10.9.3";
    RoceMigReq "ROCE-MIGREQ" Note
        "The MigReq bit differs between the two ends of a flow, or changes within it."
        "Adapters that mix it up may drop packets: both ends must agree on the path migration state."
        "IBTA vol. 1, 17.2.8";
    RoceLength "ROCE-LENGTH" Error
        "A packet's length breaks the rules: FIRST or MIDDLE of another length than a path MTU, LAST empty or too long, or a RETH's length that is not what was sent."
        "The sender's implementation, and the path MTU of both ends."
        "IBTA vol. 1, 9.7.4.1";
    RocePad "ROCE-PAD" Error
        "PadCnt and the length of the payload do not fit together."
        "The sender's implementation."
        "IBTA vol. 1, 9.2.4";
    RoceOpcodeSeq "ROCE-OPCODE-SEQ" Error
        "Opcodes follow each other in a way that no message has, and no lost or resent packet explains it."
        "The sender's implementation."
        "IBTA vol. 1, 9.7.4.1";
    CmReject "CM-REJECT" Error
        "A connection request was rejected."
        "The reason in the sentence; reason 8 means that nobody listens at that port."
        "IBTA vol. 1, 12.6.7";
    CmTimeout "CM-TIMEOUT" Error
        "A connection request was never answered."
        "Whether UDP port 4791 reaches the other end, and whether its connection manager runs."
        "IBTA vol. 1, 12.9.8";
    CmRepeated "CM-REPEATED" Warning
        "A message of the connection manager came again: sent again by its sender, or copied by the network."
        "Whether the message, or the answer to it, was lost."
        "IBTA vol. 1, 12.9.8";
    CmMra "CM-MRA" Note
        "MRA: the other end asks for more time."
        "What the program does between request and accept."
        "IBTA vol. 1, 12.6.6";
    CmRtuLate "CM-RTU-LATE" Warning
        "Data of the active end came before its RTU, or the RTU later than the connection manager's response time-out."
        "Whether the RTU was lost or the active end was busy."
        "IBTA vol. 1, 12.9.8";
    CmDreqCrossed "CM-DREQ-CROSSED" Note
        "Both ends asked to disconnect the same connection at the same time."
        "Nothing: both answers end it."
        "IBTA vol. 1, 12.9.8";
    CmDreqStale "CM-DREQ-STALE" Note
        "A DREQ for a connection that was closed already, or that the capture does not know."
        "Whether the answer to an earlier DREQ was lost."
        "IBTA vol. 1, 12.9.8";
    MpaReject "MPA-REJECT" Error
        "The MPA reply refuses the connection."
        "The private data, and revision, markers and CRC of both start-up frames."
        "RFC 5044 §7.1.1";
    MpaTimeout "MPA-TIMEOUT" Error
        "An MPA request was never answered."
        "Whether the other end speaks iWARP at that port."
        "RFC 5044 §7.1.2";
    MpaMismatch "MPA-MISMATCH" Error
        "Request and reply do not agree: revision, queue depths beyond what the other end has, or peer-to-peer flags."
        "The settings of both ends."
        "RFC 6581 §9";
    MpaRtr "MPA-RTR" Error
        "The ready-to-receive message of a peer-to-peer start is missing, or not of the kind that the reply chose."
        "The initiator's implementation."
        "RFC 6581 §8";
    MpaResponderFirst "MPA-RESPONDER-FIRST" Note
        "The responder sent an FPDU before the initiator's first: harmless where the initiator is ready already, fatal for Linux's siw where it is not."
        "Whether the responder's program may send first; peer-to-peer mode on both ends."
        "RFC 5044 §7.1.2";
    MpaSetupFailed "MPA-SETUP-FAILED" Error
        "The stream was reset after the MPA reply, before one FPDU of the initiator."
        "What the responder sent behind its reply, and the initiator's log."
        "RFC 5044 §7.1.2";
    MpaReservedFlag "MPA-RESERVED-FLAG" Note
        "Reserved bits of the MPA flags are set; Linux's siw asks so for FPDUs larger than a segment."
        "Nothing, if both ends know the bit."
        "RFC 5044 §7.1.1";
    MpaMarkerOffGrid "MPA-MARKER-OFF-GRID" Error
        "A marker is not where it must be, or points to no FPDU."
        "The sender's implementation."
        "RFC 5044 §4.3";
    IwSequence "IW-SEQUENCE" Error
        "Numbers of DDP or RDMAP are broken: queue number, MSN, message offset, or opcode."
        "The sender's implementation."
        "RFC 5041 §5.2, §5.3";
    IwLength "IW-LENGTH" Error
        "A length that the headers cannot mean."
        "The sender's implementation."
        "RFC 5040 §4, RFC 5044 §4.1";
    IwOutstanding "IW-OUTSTANDING" Error
        "More READs were outstanding than the IRD and ORD of the start-up allow."
        "IRD and ORD of both ends."
        "RFC 6581 §9.1";
    IwTerminate "IW-TERMINATE" Error
        "TERMINATE: the stream is over, because of the error that it names."
        "The message that drew it, and the STags and bounds of its sender."
        "RFC 5040 §4.8";
    IwTerminateOrder "IW-TERMINATE-ORDER" Note
        "The control field of the TERMINATE has the bit order of Linux's siw on little-endian machines."
        "Nothing: it is read as siw means it."
        "RFC 5040 §4.8";
    IwRecvMissing "IW-RECV-MISSING" Note
        "The TERMINATE says that there was no buffer for a SEND: none was posted (iWARP has no RNR NAK), or, of Linux's siw, it was too small."
        "How many receives the receiver posts, when, and of which size."
        "RFC 5041 §7.2";
    TcpGap "TCP-GAP" Warning
        "TCP segments of an iWARP stream are missing in front of this one, and never came late: lost before the capture point."
        "Drops between the sender and the capture point."
        "RFC 9293 §3.10";
    TcpRetransmit "TCP-RETRANSMIT" Warning
        "TCP sent a segment of an iWARP stream again."
        "The gap before it, or a retransmission timer that is too short."
        "RFC 6298; RFC 5681 §3.2";
    TcpReorder "TCP-REORDER" Warning
        "A TCP segment of an iWARP stream came after one that was sent later: nothing was lost."
        "Load balancing by packet."
        "RFC 9293 §3.10";
    TcpDuplicate "TCP-DUPLICATE" Warning
        "The network delivered a TCP segment of an iWARP stream twice."
        "Loops, mirrored ports that the capture sees twice."
        "RFC 9293 §3.10";
    TcpZeroWindow "TCP-ZERO-WINDOW" Warning
        "The receiver of an iWARP stream closed its TCP window: nobody takes the data."
        "The receiver: who drains its socket?"
        "RFC 9293 §3.8.6";
    TcpReset "TCP-RESET" Warning
        "An iWARP stream was reset."
        "What came before it, in the sentence."
        "RFC 9293 §3.5.2";
    TcpRefused "TCP-REFUSED" Error
        "The SYN was answered by a reset: nobody listens."
        "Whether the server runs, and its port."
        "RFC 9293 §3.10.7.1";
    CapFramesMissing "CAP-FRAMES-MISSING" Note
        "Frames are missing from the capture itself: the other end acknowledged what the capture never showed."
        "The capture's own drop counter, its buffer, and the speed of its disk."
        "IBTA vol. 1, 9.7.5.1; RFC 9293 §3.4";
    CapSnaplen "CAP-SNAPLEN" Note
        "Frames were cut by the capture's snap length: their checksums and lengths cannot be checked."
        "Capture whole frames (tcpdump -s 0)."
        "";
    CapOneWay "CAP-ONE-WAY" Note
        "Only one direction of a flow is in the capture."
        "Where the capture was made: asymmetric paths, one leg of a bond, a mirror of one direction."
        "";
    CapMidFlow "CAP-MID-FLOW" Note
        "The capture begins inside a flow: what was agreed on at its start is not known."
        "Begin the capture before the connection is made, or give --hints."
        "";
}

impl Kind {
    /// The kind with this identifier, in any case.
    pub fn from_id(id: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.id().eq_ignore_ascii_case(id))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}
