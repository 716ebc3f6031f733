#!/usr/bin/env bash
# `userdma check` beside `tshark -q -z io,stat,0` on the same capture of RoCE frames, in turns.
#
#   benches/check_speed.sh [FRAMES [MIN_RATIO [RUNS]]]      1000000 frames, no least ratio, 3 runs
#
# Prints the median seconds of both and the ratio; fails below MIN_RATIO. `check` must find nothing at warning or above.
# Wants the release binaries (cargo build --release -p userdma-cli -p userdma-benches) and tshark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
frames=${1:-1000000} least=${2:-0} runs=${3:-3}
bin=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release
command -v tshark >/dev/null || { echo "check_speed: tshark is missing (apt-get install tshark)" >&2; exit 2; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$bin/roce_frames" -n "$frames" "$dir/x.pcap"
# Both read it from memory.
cat "$dir/x.pcap" >/dev/null
seconds() { local from=$EPOCHREALTIME; "$@" >/dev/null; awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }'; }
for _ in $(seq "$runs"); do
  seconds "$bin/userdma" check "$dir/x.pcap" >>"$dir/ours"
  seconds tshark -q -r "$dir/x.pcap" -z io,stat,0 >>"$dir/theirs"
done
median() { sort -g "$1" | sed -n "$(((runs + 1) / 2))p"; }
awk -v f="$frames" -v a="$(median "$dir/ours")" -v b="$(median "$dir/theirs")" -v least="$least" 'BEGIN {
  printf "%d frames: userdma check %.3f s, tshark -q -z io,stat,0 %.3f s, ratio %.1f\n", f, a, b, b / a
  if (b / a < least) { printf "below %s\n", least; exit 1 }
}'
