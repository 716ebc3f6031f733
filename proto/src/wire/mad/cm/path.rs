//! The path of a REQ or a LAP: between which ports, and how packets are marked.

use nom::{
    Parser,
    number::complete::{be_u8, be_u16, be_u32},
};

use super::codec::{Body, Read, bit, bits, flag, gid, up};
use crate::wire::ids::Gid;

/// A path of a REQ or a LAP (IBTA vol. 1, 12.7): all zero where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Path {
    /// Local identifier of the active side; 0xffff on RoCE.
    pub local_lid: u16,
    /// Local identifier of the passive side; 0xffff on RoCE.
    pub remote_lid: u16,
    /// The active side's address.
    pub local_gid: Gid,
    /// The passive side's address.
    pub remote_gid: Gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Packet rate code, 6 bits.
    pub rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether the path stays within the subnet.
    pub subnet_local: bool,
    /// Local ACK timeout code, 5 bits; see [`timeout`](super::timeout).
    pub ack_timeout: u8,
}

impl Path {
    /// The local identifier that stands for none: RoCE has no LIDs.
    pub const PERMISSIVE_LID: u16 = 0xffff;

    /// A path of RoCE from `local` to `remote` through up to 64 routers, as Linux asks for it, but
    /// for its flow label, its rate and its ACK timeout, which are 0.
    pub fn roce(local: Gid, remote: Gid) -> Self {
        Self {
            local_lid: Self::PERMISSIVE_LID,
            remote_lid: Self::PERMISSIVE_LID,
            local_gid: local,
            remote_gid: remote,
            hop_limit: 64,
            ..Self::default()
        }
    }

    /// LIDs and GIDs: the same in both messages.
    fn read_ends(input: &[u8]) -> Read<'_, Self> {
        let (rest, (local_lid, remote_lid, local_gid, remote_gid)) =
            (be_u16, be_u16, gid, gid).parse(input)?;
        Ok((rest, Self { local_lid, remote_lid, local_gid, remote_gid, ..Self::default() }))
    }

    fn write_ends(&self, out: &mut Body) {
        out.u16(self.local_lid);
        out.u16(self.remote_lid);
        out.gid(self.local_gid);
        out.gid(self.remote_gid);
    }

    /// Service level and ACK timeout: the last two octets in both messages. Also the three low
    /// bits of the last one.
    fn read_tail(self, input: &[u8]) -> Read<'_, (Self, u8)> {
        let (rest, (level, timeout)) = (be_u8, be_u8).parse(input)?;
        let path = Self {
            service_level: bits(level, 4, 4),
            subnet_local: bit(level, 3),
            ack_timeout: bits(timeout, 3, 5),
            ..self
        };
        Ok((rest, (path, bits(timeout, 0, 3))))
    }

    fn write_tail(&self, low: u8, out: &mut Body) {
        out.u8(up(self.service_level, 4, 4) | flag(self.subnet_local, 3));
        out.u8(up(self.ack_timeout, 3, 5) | low);
    }

    /// Reads the 44 octets of a REQ. Also gives the three low bits of the last one.
    pub(super) fn read_req(input: &[u8]) -> Read<'_, (Self, u8)> {
        let (rest, ends) = Self::read_ends(input)?;
        let (rest, (word, traffic_class, hop_limit)) = (be_u32, be_u8, be_u8).parse(rest)?;
        let flow_label = word >> 12;
        Self { flow_label, rate: bits(word as u8, 0, 6), traffic_class, hop_limit, ..ends }
            .read_tail(rest)
    }

    pub(super) fn write_req(&self, low: u8, out: &mut Body) {
        self.write_ends(out);
        out.u32(self.flow_label << 12 | u32::from(up(self.rate, 0, 6)));
        out.u8(self.traffic_class);
        out.u8(self.hop_limit);
        self.write_tail(low, out);
    }

    /// Reads the 44 octets of a LAP: the rate is behind the hop limit.
    pub(super) fn read_lap(input: &[u8]) -> Read<'_, Self> {
        let (rest, ends) = Self::read_ends(input)?;
        let (rest, (word, hop_limit, rate)) = (be_u32, be_u8, be_u8).parse(rest)?;
        let (flow_label, traffic_class) = (word >> 12, word as u8);
        let (rest, (path, _)) =
            Self { flow_label, traffic_class, hop_limit, rate: bits(rate, 0, 6), ..ends }
                .read_tail(rest)?;
        Ok((rest, path))
    }

    pub(super) fn write_lap(&self, out: &mut Body) {
        self.write_ends(out);
        out.u32(self.flow_label << 12 | u32::from(self.traffic_class));
        out.u8(self.hop_limit);
        out.u8(up(self.rate, 0, 6));
        self.write_tail(0, out);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any path whose fields fit their widths.
    pub(in super::super) fn any_path() -> impl Strategy<Value = Path> {
        let ends = (any::<u16>(), any::<u16>(), any::<[u8; 16]>(), any::<[u8; 16]>());
        let marks = (0u32..1 << 20, 0u8..64, any::<u8>(), any::<u8>());
        let tail = (0u8..16, any::<bool>(), 0u8..32);
        (ends, marks, tail).prop_map(|((a, b, c, d), (e, f, g, h), (i, j, k))| Path {
            local_lid: a,
            remote_lid: b,
            local_gid: Gid(c),
            remote_gid: Gid(d),
            flow_label: e,
            rate: f,
            traffic_class: g,
            hop_limit: h,
            service_level: i,
            subnet_local: j,
            ack_timeout: k,
        })
    }
}
