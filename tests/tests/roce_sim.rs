//! RoCEv2 queue pairs in virtual time, over networks of all kinds, by seeds. The judge is
//! [`userdma_proto::sim::roce`]'s; here it is how much it is given to judge.
//!
//! `USERDMA_SIM_SEEDS=10000 cargo test --release -p userdma-tests --test roce_sim` runs so many
//! seeds, of each kind of queue pair, instead of a few.

use std::fmt::Write;

use userdma_proto::{
    roce::{PathMtu, Window},
    sim::roce::{Report, Settings, run},
    verbs::QpType,
};

fn seeds(default: u64) -> u64 {
    match std::env::var("USERDMA_SIM_SEEDS") {
        Ok(text) => text.parse().expect("USERDMA_SIM_SEEDS is a number"),
        Err(_) => default,
    }
}

/// What all seeds together lived through.
#[derive(Debug, Default)]
struct Sum {
    lost: u64,
    duplicated: u64,
    reordered: u64,
    bad_icrc: u64,
    marked: u64,
    resent: u64,
    timeouts: u64,
    kept: u64,
    rnr: u64,
    given_up: usize,
    received: u64,
}

/// Runs seeds; says which ones failed, and how.
fn run_all(count: u64, kind: QpType, out_of_order: bool) -> Sum {
    let (mut failed, mut sum) = (Vec::new(), Sum::default());
    for seed in 0..count {
        let mut settings = Settings::from_seed(seed);
        (settings.kind, settings.out_of_order) = (kind, out_of_order);
        let Report { verdict, network, stats, bad_icrc, given_up, .. } = run(&settings);
        if let Err(problem) = verdict {
            failed.push(format!("seed {seed}: {problem}"));
        }
        sum.lost += network.dropped();
        sum.duplicated += network.duplicated;
        sum.reordered += network.reordered;
        sum.bad_icrc += bad_icrc;
        sum.marked += stats.ce_marked;
        sum.resent += stats.packets_resent;
        sum.timeouts += stats.timeouts;
        sum.kept += stats.kept;
        sum.rnr += stats.rnr_naks_received;
        sum.given_up += given_up.len();
        sum.received += stats.payload_received;
    }
    let first: Vec<_> = failed.iter().take(20).collect();
    assert!(failed.is_empty(), "{} of {count} seeds: {first:#?}", failed.len());
    eprintln!("{count} seeds of {kind:?}: {sum:?}");
    sum
}

#[test]
fn reliable_connections_are_reliable() {
    let sum = run_all(seeds(400), QpType::Rc, false);
    // Everything that is to be lived through has happened.
    assert!(sum.lost > 500 && sum.duplicated > 500 && sum.reordered > 500, "{sum:?}");
    assert!(sum.bad_icrc > 100 && sum.marked > 500 && sum.resent > 500, "{sum:?}");
    assert!(sum.timeouts > 100 && sum.rnr > 50 && sum.given_up > 5, "{sum:?}");
}

/// The same, where both sides keep what comes out of order.
#[test]
fn what_comes_out_of_order_is_kept() {
    let sum = run_all(seeds(400), QpType::Rc, true);
    assert!(sum.lost > 500 && sum.duplicated > 500 && sum.reordered > 500, "{sum:?}");
    assert!(sum.timeouts > 100 && sum.rnr > 50 && sum.given_up > 5, "{sum:?}");
    assert!(sum.kept > 1000 && sum.resent > 500, "{sum:?}");
}

#[test]
fn what_arrives_unreliably_is_right() {
    for kind in [QpType::Uc, QpType::Ud] {
        let sum = run_all(seeds(200), kind, false);
        assert!(sum.lost > 100 && sum.bad_icrc > 20 && sum.received > 1 << 20, "{sum:?}");
        assert_eq!((sum.resent, sum.given_up), (0, 0), "{kind:?}");
    }
}

/// The same seed is the same run.
#[test]
fn a_seed_stands_for_one_run() {
    let mut settings = Settings::from_seed(3);
    settings.record = true;
    let report = run(&settings);
    assert_eq!(run(&settings), report);
    assert!(report.capture.is_some_and(|capture| capture.len() > 1000));
    assert_ne!(run(&Settings::from_seed(4)).stats, report.stats);
}

/// On a network that loses everything all give up, and are right to. (That the judge does not let
/// pass who gives up without a loss its own tests show.)
#[test]
fn who_gives_up_had_reason_to() {
    let mut settings = Settings::from_seed(5);
    (settings.retry_cnt, settings.operations) = (2, 20);
    settings.impairments = "loss=100%".parse().expect("impairments");
    let report = run(&settings);
    assert_eq!(report.verdict, Ok(()));
    assert_eq!(report.given_up.len(), 2 * settings.pairs);
    assert!(report.failed > 0 && report.flushed > 0 && report.stats.timeouts >= 3);
}

/// A line of the table, and how many packets were sent again.
fn row(table: &mut String, loss: &str, mtu: PathMtu, packets: u32, kept: bool) -> u64 {
    let mut s = Settings::from_seed(11);
    (s.pairs, s.operations, s.longest) = (1, 60, 30_000);
    (s.retry_cnt, s.slow, s.ipv6, s.mtu) = (7, false, false, mtu);
    s.window = Window { packets, octets: packets * (mtu.octets() + 60) };
    s.out_of_order = kept;
    let network = format!("loss={loss},delay=50us,rate=1GB,queue=1MB,seed=11");
    s.impairments = network.parse().expect("impairments");
    let report = run(&s);
    assert_eq!(report.verdict, Ok(()), "{loss} {mtu:?} {packets} {kept}");
    assert!(report.given_up.is_empty(), "{loss} {mtu:?} {packets} {kept}");
    let stats = report.stats;
    writeln!(
        table,
        "{loss:<5} {:>4} {packets:>6} | {:>5} {:>6} {:>8} {:>13} | {:>15.3}",
        mtu.octets(),
        stats.packets_sent,
        stats.packets_resent,
        stats.timeouts,
        stats.sequence_naks_received,
        report.time.as_nanos() as f64 / 1e6,
    )
    .expect("a string takes it");
    stats.packets_resent
}

/// One fixed load over loss × MTU × window, toward any peer and toward one that keeps what comes out
/// of order. A change of behaviour shows here; where it is meant, `UPDATE_GOLDENS=1` writes the file
/// anew.
#[test]
fn table_of_loss_mtu_and_window() {
    let mut table = String::new();
    let mut resent = [[0; 4]; 2];
    for kept in [false, true] {
        let peer = if kept { "keeps what comes out of order" } else { "any" };
        writeln!(table, "the peer: {peer}").expect("a string takes it");
        table.push_str(
            "loss   mtu window |  sent resent timeouts sequence-naks | virtual time ms\n",
        );
        for (i, loss) in ["0%", "0.1%", "1%", "5%"].into_iter().enumerate() {
            for mtu in [PathMtu::Mtu256, PathMtu::Mtu1024, PathMtu::Mtu4096] {
                for packets in [8, 32, 128, 1024] {
                    resent[usize::from(kept)][i] += row(&mut table, loss, mtu, packets, kept);
                }
            }
        }
    }
    // Without loss nothing is, and with it less where only what is missing is.
    let [[none, any @ ..], [nor, kept @ ..]] = resent;
    assert_eq!((none, nor), (0, 0));
    assert!(any.iter().zip(kept).skip(1).all(|(any, kept)| kept * 3 < *any * 2), "{resent:?}");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/roce_sim.txt");
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::write(path, &table).expect("the golden file is written");
    }
    let golden = std::fs::read_to_string(path).expect("the golden file is there");
    assert!(golden == table, "expected\n{golden}\nfound\n{table}\nUPDATE_GOLDENS=1 if it is meant");
}
