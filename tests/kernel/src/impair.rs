//! What a bad network does to packets: netem in the guest, and proof that it did it.
//!
//! It is the guest's, since this host's kernel may have none: of what the guest sends on eth0, of what it receives
//! on ifb0. What has been done is read where it shows: in netem's own counters, in the capture (which lies between
//! the two machines), and in what the guest's TCP and rxe counted.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Context, Result, ensure};

use crate::{
    case::{Lab, Link},
    wire,
};

/// Takes netem away again.
pub(crate) const MEND: &str =
    "tc qdisc del dev eth0 root 2>/dev/null; tc qdisc del dev eth0 ingress 2>/dev/null; true";

/// Has netem do `what` to all that the guest sends and receives.
pub(crate) fn script(what: &str) -> String {
    format!(
        // One packet of the wire is one of netem's.
        "ethtool -K eth0 gro off || exit 1\n\
         tc qdisc replace dev eth0 root netem limit 10000 {what} || exit 1\n\
         tc qdisc replace dev ifb0 root netem limit 10000 {what} || exit 1\n\
         tc qdisc show dev eth0 ingress | grep -q ingress || tc qdisc add dev eth0 ingress || exit 1\n\
         tc filter replace dev eth0 parent ffff: protocol all prio 1 matchall \
         action mirred egress redirect dev ifb0 || exit 1"
    )
}

/// What is to be seen of a network, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Lost,
    Duplicated,
    Reordered,
}

/// Counters of the guest, by name: what netem dropped and put out, what TCP and rxe met.
const COUNTERS: &str = r#"
for dev in eth0 ifb0; do
  tc -s qdisc show dev $dev root | sed -n "s/.*Sent [0-9]* bytes \([0-9]*\) pkt (dropped \([0-9]*\),.*/$dev.sent \1\n$dev.dropped \2/p"
done
tc -s filter show dev eth0 parent ffff: | sed -n 's/.*Sent [0-9]* bytes \([0-9]*\) pkt (dropped.*/ifb0.taken \1/p'
awk '/^TcpExt/ { if (names) { n = split(names, name); split($0, value); for (i = 2; i <= n; i++) print "tcp." name[i], value[i] } names = $0 }' /proc/net/netstat
for file in /sys/class/infiniband/rxe0/ports/1/hw_counters/*; do
  [ ! -f "$file" ] || echo "rxe.${file##*/} $(cat "$file")"
done
"#;

/// What the guest has counted.
#[derive(Debug, Default)]
struct Counted(BTreeMap<String, u64>);

impl Counted {
    fn ask(lab: &Lab) -> Result<Self> {
        let said = lab.guest(COUNTERS)?;
        let text = said.success()?.text();
        Ok(Self(parse(&text)))
    }

    fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

fn parse(text: &str) -> BTreeMap<String, u64> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?))).collect()
}

/// A network that is not what it should be, until the case ends.
pub(crate) struct Impairment<'a> {
    lab: &'a Lab,
    before: Counted,
}

impl<'a> Impairment<'a> {
    /// netem does `what` from now on.
    pub(crate) fn new(lab: &'a Lab, what: &str) -> Result<Self> {
        let before = Counted::ask(lab)?;
        lab.guest(&script(what))?.success().context("netem is not set up")?;
        Ok(Self { lab, before })
    }

    /// How often each of `effects` has been met, to the guest and from it.
    pub(crate) fn met(&self, effects: &[Effect]) -> Result<Vec<(Effect, [u64; 2])>> {
        let now = Counted::ask(self.lab)?;
        let more = |name: &str| now.get(name).saturating_sub(self.before.get(name));
        let idents = self.lab.identifications()?;
        let from_guest = of(&idents, self.lab.peer(false));
        let met = effects.iter().map(|&effect| {
            let counts = match effect {
                Effect::Lost => [more("ifb0.dropped"), more("eth0.dropped")],
                Effect::Duplicated => [
                    // What came out of it and did not go in.
                    (more("ifb0.sent") + more("ifb0.dropped")).saturating_sub(more("ifb0.taken")),
                    wire::copies(&from_guest),
                ],
                Effect::Reordered => [
                    match self.lab.link() {
                        Link::Siw => more("tcp.TCPOFOQueue"),
                        Link::Rxe => {
                            more("rxe.out_of_seq_request")
                                + more("rxe.rcvd_seq_err")
                                + more("rxe.completer_retry_err")
                        }
                    },
                    wire::late(&from_guest),
                ],
            };
            (effect, counts)
        });
        Ok(met.collect())
    }

    /// An error unless all of `effects` were met in both directions: what was tested else?
    pub(crate) fn was_met(&self, effects: &[Effect]) -> Result<()> {
        let met = self.met(effects)?;
        ensure!(
            met.iter().all(|(_, counts)| counts.iter().all(|&count| count > 0)),
            "the network did not do what it was told to (to the guest, from it): {met:?}"
        );
        Ok(())
    }
}

/// The identifications of the packets of `from`, in the order of the capture. TCP has 0 where no connection sends.
fn of(idents: &[(IpAddr, u16)], from: IpAddr) -> Vec<u16> {
    idents
        .iter()
        .filter(|&&(sender, ident)| sender == from && ident != 0)
        .map(|&(_, ident)| ident)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_pairs() {
        let counted =
            Counted(parse("eth0.sent 12\neth0.dropped 3\n\ngarbage\ntcp.TCPOFOQueue 7\n"));
        assert_eq!((counted.get("eth0.dropped"), counted.get("tcp.TCPOFOQueue")), (3, 7));
        assert_eq!(counted.get("garbage"), 0);
    }
}
