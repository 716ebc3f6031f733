//! Every field of a decoded frame, one by one: JSON and `-v` both print what is told here.

use std::net::IpAddr;

use userdma_proto::{
    dissect::{
        CrcState, DdpHeader, Fpdu, Frame, IcrcState, Iwarp, Layer, Markers, Operation, Pause, Roce,
        Start, Version,
    },
    wire::{
        ids,
        iwarp::{
            ddp::Segment,
            mpa::{StartFlags, StartKind},
            rdmap::{Opcode, ReadRequest},
            terminate::{TermCode, TermLayer, Terminate},
        },
        mad::{
            Mad, MadHeader, attribute_name, class_name,
            cm::{Message, Path},
            method_name,
        },
        roce::{
            Headers,
            aeth::{Aeth, Syndrome, credits, rnr_micros},
            grh::Grh,
        },
    },
};

/// A field's value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    /// Not known.
    Null,
    Bool(bool),
    Num(u64),
    /// A number that people read in hex, with so many digits: keys, queue pairs.
    Key(u32, usize),
    /// 64 bits, in hex everywhere.
    Wide(u64),
    Text(&'a str),
    /// A code without a name: its hex digits in place of one.
    Unnamed(u32, usize),
    Ip(IpAddr),
    Gid(ids::Gid),
    Octets(&'a [u8]),
    /// Nanoseconds since 1970.
    Time(i128),
    Layers(&'a [Layer]),
    Nums(&'a [u16]),
}

/// Takes fields.
pub(super) trait Fields {
    fn value(&mut self, key: &'static str, value: Value<'_>);
    /// The values that follow, up to `close`, belong to the object `key`.
    fn open(&mut self, key: &'static str);
    fn close(&mut self);
    /// The items that follow, up to `close_list`, belong to the list `key`.
    fn open_list(&mut self, key: &'static str);
    /// The values that follow, up to `close`, belong to the list's next object.
    fn item(&mut self);
    fn close_list(&mut self);
}

use Value::*;

/// Tells all of `frame`.
pub(super) fn frame(out: &mut impl Fields, frame: &Frame) {
    out.value("frame", Num(frame.number));
    out.value("time_ns", frame.time_ns.map_or(Null, Time));
    out.value("len", Num(frame.len.into()));
    out.value("caplen", Num(frame.caplen.into()));
    out.value("stack", Layers(&frame.stack));
    if let Some(ends) = &frame.ends {
        out.value("src", Ip(ends.src));
        out.value("dst", Ip(ends.dst));
        if let Some((sport, dport)) = ends.ports {
            out.value("sport", Num(sport.into()));
            out.value("dport", Num(dport.into()));
        }
    }
    if let Some(ip) = &frame.ip {
        out.value("dscp", Num(ip.dscp.into()));
        out.value("ecn", Num(ip.ecn.into()));
        out.value("ttl", Num(ip.ttl.into()));
    }
    if let Some(tcp) = &frame.tcp {
        out.open("tcp");
        out.value("seq", Num(tcp.seq.into()));
        out.value("ack", Num(tcp.ack.into()));
        out.value("flags", Num(tcp.flags.into()));
        out.value("payload_len", Num(tcp.payload_len.into()));
        out.close();
    }
    if let Some((first, more)) = frame.roce.split_first() {
        out.open("roce");
        roce(out, first);
        out.close();
        if !more.is_empty() {
            out.open_list("roce_more");
            for packet in more {
                out.item();
                roce(out, packet);
                out.close();
            }
            out.close_list();
        }
    }
    if !frame.iwarp.is_empty() {
        out.open_list("iwarp");
        for found in &frame.iwarp {
            out.item();
            iwarp(out, found);
            out.close();
        }
        out.close_list();
    }
    match &frame.pause {
        None => {}
        Some(Pause::Link(quanta)) => {
            out.open("pause");
            out.value("quanta", Num((*quanta).into()));
            out.close();
        }
        Some(Pause::Priorities(enabled, quanta)) => {
            out.open("pfc");
            out.value("enabled", Key((*enabled).into(), 2));
            out.value("quanta", Nums(quanta));
            out.close();
        }
    }
    error(out, frame.error.as_deref());
}

fn error(out: &mut impl Fields, error: Option<&str>) {
    if let Some(error) = error {
        out.value("error", Text(error));
    }
}

/// The first thing in `frame` that could not be decoded.
pub(super) fn first_error(frame: &Frame) -> Option<String> {
    let roce = || frame.roce.iter().find_map(|roce| roce.error.clone().or_else(|| mad_error(roce)));
    let iwarp = || {
        frame.iwarp.iter().find_map(|found| match found {
            Iwarp::Start(_) => None,
            Iwarp::Fpdu(fpdu) => fpdu.error.clone(),
            Iwarp::Error(error) => Some(error.clone()),
        })
    };
    frame.error.clone().or_else(roce).or_else(iwarp)
}

fn mad_error(roce: &Roce) -> Option<String> {
    let mad = Mad::parse(roce.mad.as_deref()?);
    mad.and_then(|mad| mad.cm()).err().map(|error| error.to_string())
}

/// A name, or the code in hex.
fn name(name: Option<&'static str>, code: u32, digits: usize) -> Value<'static> {
    name.map_or(Unnamed(code, digits), Text)
}

pub(super) const fn icrc_name(state: IcrcState) -> &'static str {
    match state {
        IcrcState::Good => "good",
        IcrcState::Bad => "bad",
        IcrcState::Absent => "absent",
    }
}

fn roce(out: &mut impl Fields, roce: &Roce) {
    let version = match roce.version {
        Version::V1 => "1",
        Version::V2 => "2",
        Version::Ib => "ib",
    };
    out.value("version", Text(version));
    match &roce.headers {
        Some(headers) => {
            let bth = &headers.bth;
            out.value("opcode", name(bth.opcode().name(), bth.opcode.into(), 2));
            out.value("opcode_value", Num(bth.opcode.into()));
            out.value("dest_qp", Key(bth.dest_qp().0, 6));
            out.value("psn", Num(bth.psn().get().into()));
            out.value("ack_req", Bool(bth.ack_req()));
            out.value("solicited", Bool(bth.solicited()));
            out.value("migreq", Bool(bth.migreq()));
            out.value("pad", Num(bth.pad().into()));
            out.value("tver", Num(bth.tver().into()));
            out.value("pkey", Key(bth.pkey().0, 4));
            out.value("becn", Bool(bth.becn()));
            out.value("fecn", Bool(bth.fecn()));
        }
        None => {
            let unknown = [
                "opcode",
                "opcode_value",
                "dest_qp",
                "psn",
                "ack_req",
                "solicited",
                "migreq",
                "pad",
                "tver",
                "pkey",
                "becn",
                "fecn",
            ];
            unknown.into_iter().for_each(|key| out.value(key, Null));
        }
    }
    out.value("payload_len", Num(roce.payload_len.into()));
    out.value("icrc", Text(icrc_name(roce.icrc)));
    if let Some(vcrc) = roce.vcrc {
        out.value("vcrc", Text(icrc_name(vcrc)));
    }
    if let Some(lrh) = &roce.lrh {
        out.open("lrh");
        out.value("vl", Num(lrh.virtual_lane().into()));
        out.value("sl", Num(lrh.service_level().into()));
        out.value("lnh", Num(lrh.next_header().into()));
        out.value("dlid", Num(lrh.dlid.get().into()));
        out.value("packet_len", Num(lrh.packet_len() as u64));
        out.value("slid", Num(lrh.slid.get().into()));
        out.close();
    }
    if let Some(header) = &roce.grh {
        grh(out, header);
    }
    if let Some(headers) = &roce.headers {
        extended(out, headers);
    }
    if let Some(octets) = &roce.mad {
        out.open("mad");
        mad(out, octets);
        out.close();
    }
    error(out, roce.error.as_deref());
}

fn grh(out: &mut impl Fields, grh: &Grh) {
    out.open("grh");
    out.value("traffic_class", Num(grh.traffic_class().into()));
    out.value("flow_label", Key(grh.flow_label(), 5));
    out.value("payload_len", Num(grh.payload_len() as u64));
    out.value("next_header", Num(grh.next_header.into()));
    out.value("hop_limit", Num(grh.hop_limit.into()));
    out.value("sgid", Gid(grh.sgid));
    out.value("dgid", Gid(grh.dgid));
    out.close();
}

fn extended(out: &mut impl Fields, headers: &Headers) {
    if let Some(rdeth) = &headers.rdeth {
        out.open("rdeth");
        out.value("ee_context", Key(rdeth.ee_context(), 6));
        out.close();
    }
    if let Some(xrceth) = &headers.xrceth {
        out.open("xrceth");
        out.value("srq", Key(xrceth.srq(), 6));
        out.close();
    }
    if let Some(deth) = &headers.deth {
        out.open("deth");
        out.value("qkey", Key(deth.qkey().0, 8));
        out.value("src_qp", Key(deth.src_qp().0, 6));
        out.close();
    }
    if let Some(feth) = &headers.feth {
        out.open("feth");
        out.value("placement", Num(feth.placement().bits().into()));
        out.value("selectivity", Num(feth.selectivity().0.into()));
        out.close();
    }
    if let Some(reth) = &headers.reth {
        out.open("reth");
        out.value("va", Wide(reth.va.get()));
        out.value("rkey", Key(reth.rkey.get(), 8));
        out.value("len", Num(reth.len.get().into()));
        out.close();
    }
    if let Some(atomic) = &headers.atomic_eth {
        out.open("atomic_eth");
        out.value("va", Wide(atomic.va.get()));
        out.value("rkey", Key(atomic.rkey.get(), 8));
        out.value("swap_add", Wide(atomic.swap_add.get()));
        out.value("compare", Wide(atomic.compare.get()));
        out.close();
    }
    if let Some(header) = &headers.aeth {
        aeth(out, header);
    }
    if let Some(ack) = &headers.atomic_ack_eth {
        out.open("atomic_ack");
        out.value("original", Wide(ack.original.get()));
        out.close();
    }
    if let Some(immdt) = &headers.immdt {
        out.value("immdt", Key(immdt.data.get(), 8));
    }
    if let Some(ieth) = &headers.ieth {
        out.value("ieth", Key(ieth.rkey.get(), 8));
    }
}

fn aeth(out: &mut impl Fields, aeth: &Aeth) {
    out.open("aeth");
    let code = Num((aeth.syndrome & 0x1f).into());
    match aeth.syndrome() {
        Syndrome::Ack(credit) => {
            out.value("kind", Text("ACK"));
            out.value("code", code);
            out.value("credits", credits(credit).map_or(Null, |n| Num(n.into())));
        }
        Syndrome::RnrNak(timer) => {
            out.value("kind", Text("RNR_NAK"));
            out.value("code", code);
            out.value("wait_us", Num(rnr_micros(timer).into()));
        }
        Syndrome::Nak(nak) => {
            out.value("kind", Text("NAK"));
            out.value("code", code);
            out.value("reason", name(nak.name(), nak.0.into(), 2));
        }
        Syndrome::Reserved(_) => {
            out.value("kind", Null);
            out.value("code", code);
        }
    }
    out.value("syndrome", Key(aeth.syndrome.into(), 2));
    out.value("msn", Num(aeth.msn().into()));
    out.close();
}

fn mad(out: &mut impl Fields, octets: &[u8]) {
    let mad = match Mad::parse(octets) {
        Ok(mad) => mad,
        Err(e) => return error(out, Some(&e.to_string())),
    };
    let &MadHeader { base_version, mgmt_class, class_version, method, .. } = mad.header;
    let attribute = mad.header.attribute_id.get();
    out.value("base_version", Num(base_version.into()));
    out.value("mgmt_class", Num(mgmt_class.into()));
    out.value("class", name(class_name(mgmt_class), mgmt_class.into(), 2));
    out.value("class_version", Num(class_version.into()));
    out.value("method", Num(method.into()));
    out.value("method_name", name(method_name(mgmt_class, method), method.into(), 2));
    out.value("status", Num(mad.header.status.get().into()));
    out.value("class_specific", Num(mad.header.class_specific.get().into()));
    out.value("tid", Wide(mad.header.tid.get()));
    out.value("attribute_id", Num(attribute.into()));
    out.value("attribute", name(attribute_name(mgmt_class, attribute), attribute.into(), 4));
    out.value("attribute_modifier", Num(mad.header.attribute_modifier.get().into()));
    match mad.cm() {
        Ok(Some(message)) => cm(out, &message),
        Ok(None) => {}
        Err(e) => error(out, Some(&e.to_string())),
    }
}

fn cm(out: &mut impl Fields, message: &Message<'_>) {
    let id = |n| Key(n, 8);
    match message {
        Message::Req(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("vendor_id", Key(m.vendor_id, 6));
            out.value("service_id", Wide(m.service_id));
            out.value("ca_guid", Wide(m.ca_guid));
            out.value("qkey", Key(m.qkey.0, 8));
            out.value("qpn", Key(m.qpn.0, 6));
            out.value("responder_resources", Num(m.responder_resources.into()));
            out.value("eecn", Key(m.eecn, 6));
            out.value("initiator_depth", Num(m.initiator_depth.into()));
            out.value("remote_eecn", Key(m.remote_eecn, 6));
            out.value("remote_cm_timeout", Num(m.remote_cm_timeout.into()));
            out.value("transport", Num(m.transport.into()));
            out.value("flow_control", Bool(m.flow_control));
            out.value("start_psn", Num(m.start_psn.get().into()));
            out.value("local_cm_timeout", Num(m.local_cm_timeout.into()));
            out.value("retry_count", Num(m.retry_count.into()));
            out.value("pkey", Key(m.pkey.0, 4));
            out.value("mtu", Num(m.mtu.into()));
            out.value("rdc_exists", Bool(m.rdc_exists));
            out.value("rnr_retry_count", Num(m.rnr_retry_count.into()));
            out.value("max_cm_retries", Num(m.max_cm_retries.into()));
            out.value("srq", Bool(m.srq));
            out.value("extended_transport", Num(m.extended_transport.into()));
            path(out, "primary", &m.primary);
            if m.alternate != Path::default() {
                path(out, "alternate", &m.alternate);
            }
            out.value("sap_supported", Bool(m.sap_supported));
        }
        Message::Mra(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
            out.value("message", Num(m.message.into()));
            out.value("message_name", name(m.message_name(), m.message.into(), 1));
            out.value("service_timeout", Num(m.service_timeout.into()));
        }
        Message::Rej(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
            out.value("message", Num(m.message.into()));
            out.value("message_name", name(m.message_name(), m.message.into(), 1));
            out.value("reason", Num(m.reason.0.into()));
            out.value("reason_name", name(m.reason.name(), m.reason.0.into(), 4));
            out.value("info_len", Num(m.info_len.into()));
            out.value("ari", Octets(m.ari));
        }
        Message::Rep(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
            out.value("qkey", Key(m.qkey.0, 8));
            out.value("qpn", Key(m.qpn.0, 6));
            out.value("eecn", Key(m.eecn, 6));
            out.value("vendor_id", Key(m.vendor_id, 6));
            out.value("start_psn", Num(m.start_psn.get().into()));
            out.value("responder_resources", Num(m.responder_resources.into()));
            out.value("initiator_depth", Num(m.initiator_depth.into()));
            out.value("target_ack_delay", Num(m.target_ack_delay.into()));
            out.value("failover", Num(m.failover.into()));
            out.value("flow_control", Bool(m.flow_control));
            out.value("rnr_retry_count", Num(m.rnr_retry_count.into()));
            out.value("srq", Bool(m.srq));
            out.value("ca_guid", Wide(m.ca_guid));
        }
        Message::Rtu(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
        }
        Message::Dreq(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
            out.value("remote_qpn", Key(m.remote_qpn.0, 6));
        }
        Message::Drep(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
        }
        Message::SidrReq(m) => {
            out.value("request_id", id(m.request_id));
            out.value("pkey", Key(m.pkey.0, 4));
            out.value("service_id", Wide(m.service_id));
        }
        Message::SidrRep(m) => {
            out.value("request_id", id(m.request_id));
            out.value("sidr_status", Num(m.status.into()));
            out.value("sidr_status_name", name(m.status_name(), m.status.into(), 2));
            out.value("vendor_id", Key(m.vendor_id, 6));
            out.value("qpn", Key(m.qpn.0, 6));
            out.value("service_id", Wide(m.service_id));
            out.value("qkey", Key(m.qkey.0, 8));
            out.value("info_len", Num(m.info_len.into()));
            out.value("info", Octets(m.info));
        }
        Message::Lap(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
            out.value("remote_qpn", Key(m.remote_qpn.0, 6));
            out.value("remote_cm_timeout", Num(m.remote_cm_timeout.into()));
            path(out, "alternate", &m.alternate);
        }
        Message::Apr(m) => {
            out.value("local_comm_id", id(m.local_comm_id));
            out.value("remote_comm_id", id(m.remote_comm_id));
            out.value("info_len", Num(m.info_len.into()));
            out.value("ap_status", Num(m.status.into()));
            out.value("ap_status_name", name(m.status_name(), m.status.into(), 2));
            out.value("info", Octets(m.info));
        }
    }
    let found = message.ip_cm();
    if let Some((ip_cm, _)) = &found {
        out.open("ip_cm");
        out.value("version", Num(ip_cm.version.into()));
        out.value("ip_version", Num(ip_cm.ip_version.into()));
        out.value("src_port", Num(ip_cm.src_port.into()));
        if let Some((src, dst)) = ip_cm.addresses() {
            out.value("src", Ip(src));
            out.value("dst", Ip(dst));
        }
        out.close();
    }
    // What rdma_cm put in front of it was told.
    let private_data = found.map_or(message.private_data(), |(_, rest)| rest);
    out.value("private_data", Octets(private_data));
}

fn path(out: &mut impl Fields, key: &'static str, path: &Path) {
    out.open(key);
    out.value("local_lid", Num(path.local_lid.into()));
    out.value("remote_lid", Num(path.remote_lid.into()));
    out.value("local_gid", Gid(path.local_gid));
    out.value("remote_gid", Gid(path.remote_gid));
    out.value("flow_label", Key(path.flow_label, 5));
    out.value("rate", Num(path.rate.into()));
    out.value("traffic_class", Num(path.traffic_class.into()));
    out.value("hop_limit", Num(path.hop_limit.into()));
    out.value("service_level", Num(path.service_level.into()));
    out.value("subnet_local", Bool(path.subnet_local));
    out.value("ack_timeout", Num(path.ack_timeout.into()));
    out.close();
}

fn iwarp(out: &mut impl Fields, found: &Iwarp) {
    match found {
        Iwarp::Start(frame) => start(out, frame),
        Iwarp::Fpdu(found) => fpdu(out, found),
        Iwarp::Error(what) => {
            out.value("kind", Text("error"));
            error(out, Some(what));
        }
    }
}

fn start(out: &mut impl Fields, start: &Start) {
    let flag = |flag| Bool(start.flags.contains(flag));
    out.value(
        "kind",
        Text(match start.kind {
            StartKind::Request => "mpa_req",
            StartKind::Reply => "mpa_rep",
        }),
    );
    out.value("m", flag(StartFlags::MARKERS));
    out.value("c", flag(StartFlags::CRC));
    out.value("r", flag(StartFlags::REJECT));
    out.value("s", flag(StartFlags::ENHANCED));
    out.value("flags", Key(start.flags.bits().into(), 2));
    out.value("revision", Num(start.revision.into()));
    if let Some(enhanced) = &start.enhanced {
        out.value("ird", Num(enhanced.ird.into()));
        out.value("ord", Num(enhanced.ord.into()));
        out.value("a", Bool(enhanced.peer_to_peer));
        out.value("b", Bool(enhanced.rtr_send));
        out.value("rtr_write", Bool(enhanced.rtr_write));
        out.value("rtr_read", Bool(enhanced.rtr_read));
    }
    if let Some((ird, ord)) = start.legacy_ird_ord {
        out.value("legacy_ird", Num(ird.into()));
        out.value("legacy_ord", Num(ord.into()));
    }
    out.value("private_data", Octets(&start.private_data));
}

/// The operation's name; a WRITE says what it is, as RFC 5040 does.
pub(super) const fn rdmap_name(opcode: Opcode) -> Option<&'static str> {
    match opcode {
        Opcode::WRITE => Some("RDMA_WRITE"),
        other => other.name(),
    }
}

fn fpdu(out: &mut impl Fields, fpdu: &Fpdu) {
    out.value("kind", Text("fpdu"));
    match &fpdu.header {
        Some(header) => {
            let opcode = header.opcode();
            out.value("rdmap_opcode", name(rdmap_name(opcode), opcode.0.into(), 1));
            out.value("last", Bool(header.last()));
        }
        None => {
            out.value("rdmap_opcode", Null);
            out.value("last", Null);
        }
    }
    out.value("ulpdu_len", Num(fpdu.ulpdu_len.into()));
    out.value("payload_len", Num(fpdu.payload_len.into()));
    out.value(
        "crc",
        Text(match fpdu.crc {
            CrcState::Good => "good",
            CrcState::Bad => "bad",
            CrcState::Zero => "zero",
        }),
    );
    out.value("crc_in_use", fpdu.crc_in_use.map_or(Null, Bool));
    match fpdu.markers {
        Markers::None => {}
        Markers::Right => out.value("markers", Text("right")),
        Markers::OffGrid => out.value("markers", Text("off_grid")),
    }
    match &fpdu.header {
        Some(DdpHeader::Tagged(header)) => {
            out.value("stag", Key(header.stag().0, 8));
            out.value("to", Wide(header.to.get()));
        }
        Some(DdpHeader::Untagged(header)) => {
            out.value("qn", Num(header.qn.get().into()));
            out.value("msn", Num(header.msn().0.into()));
            out.value("mo", Num(header.mo.get().into()));
            if header.opcode().invalidates() {
                out.value("inv_stag", Key(header.invalidate_stag().0, 8));
            }
        }
        None => {}
    }
    match &fpdu.operation {
        Operation::None => {}
        Operation::ReadRequest(request) => read_request(out, request),
        Operation::Immediate(data) => out.value("imm", Wide(*data)),
        Operation::AtomicRequest(request) => {
            let operation = request.operation();
            out.value("atomic", name(operation.name(), operation.0.into(), 1));
            out.value("request_id", Key(request.request_id.get(), 8));
            out.value("remote_stag", Key(request.stag.get(), 8));
            out.value("remote_to", Wide(request.to.get()));
            out.value("swap_add", Wide(request.add_swap_data.get()));
            out.value("swap_add_mask", Wide(request.add_swap_mask.get()));
            out.value("compare", Wide(request.compare_data.get()));
            out.value("compare_mask", Wide(request.compare_mask.get()));
        }
        Operation::AtomicResponse(response) => {
            out.value("request_id", Key(response.request_id.get(), 8));
            out.value("original", Wide(response.original.get()));
        }
        Operation::Terminate(found, octets) => {
            out.open("terminate");
            terminate(out, found, octets);
            out.close();
        }
    }
    error(out, fpdu.error.as_deref());
}

fn read_request(out: &mut impl Fields, request: &ReadRequest) {
    out.value("sink_stag", Key(request.sink_stag.get(), 8));
    out.value("sink_to", Wide(request.sink_to.get()));
    out.value("size", Num(request.size.get().into()));
    out.value("source_stag", Key(request.source_stag.get(), 8));
    out.value("source_to", Wide(request.source_to.get()));
}

/// The code of a Terminate as RFC 5040 reads its first two octets, and as siw means them.
pub(super) fn both_codes(octets: &[u8]) -> Option<(TermCode, TermCode)> {
    let &[first, code, ..] = octets else { return None };
    let rfc = TermCode::from_u16(u16::from_be_bytes([first, code]));
    Some((rfc, TermCode::new(TermLayer(rfc.etype), rfc.layer.0, rfc.code)))
}

fn terminate(out: &mut impl Fields, terminate: &Terminate, octets: &[u8]) {
    if let Some((rfc, siw)) = both_codes(octets) {
        let bits = octets.get(2).copied().unwrap_or_default();
        term_code(out, "rfc", rfc, [0x80, 0x40, 0x20].map(|bit| bits & bit != 0));
        term_code(out, "siw", siw, [0x01, 0x02, 0x04].map(|bit| bits & bit != 0));
    }
    out.value("meant", Text(if terminate.swapped { "siw" } else { "rfc" }));
    out.value("segment_len", terminate.ddp_segment_len.map_or(Null, |len| Num(len.into())));
    if let Some(segment) = terminate.ddp_header.as_ref().and_then(|header| header.segment()) {
        out.open("segment");
        let opcode = segment.opcode();
        out.value("rdmap_opcode", name(rdmap_name(opcode), opcode.0.into(), 1));
        out.value("last", Bool(segment.last()));
        match segment {
            Segment::Tagged { header, .. } => {
                out.value("stag", Key(header.stag().0, 8));
                out.value("to", Wide(header.to.get()));
            }
            Segment::Untagged { header, .. } => {
                out.value("qn", Num(header.qn.get().into()));
                out.value("msn", Num(header.msn().0.into()));
                out.value("mo", Num(header.mo.get().into()));
            }
        }
        out.close();
    }
    if let Some(request) = terminate.read_request() {
        out.open("read_request");
        read_request(out, request);
        out.close();
    }
    out.value("octets", Octets(octets));
}

fn term_code(out: &mut impl Fields, key: &'static str, code: TermCode, [m, d, r]: [bool; 3]) {
    out.open(key);
    out.value("layer", Num(code.layer.0.into()));
    out.value("etype", Num(code.etype.into()));
    out.value("code", Num(code.code.into()));
    out.value("text", Text(&code.to_string()));
    out.value("m", Bool(m));
    out.value("d", Bool(d));
    out.value("r", Bool(r));
    out.close();
}
