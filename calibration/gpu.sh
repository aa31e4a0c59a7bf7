#!/usr/bin/env bash
# One call on a machine with a GPU: GPU tests, a full calibration, and everything in gpu.py, stock against autokern.
# Everything it finds lies under $OUT (default: ./out). Resumable: what stands there is not measured again on the same
# machine, and after $LIMIT seconds (default 530) nothing is begun: run it again until it says that all is done. Where a
# call starts with an empty $OUT, PACK=1 leaves one file there, gpu.tgz, and RESUME=gpu.tgz goes on from it.
# Needs no network; works with an uninstalled checkout, if the dependencies can be imported. $PYTHON is the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${OUT:=out}"
OUT=$(cd "$OUT" && pwd)
python=${PYTHON:-python3}
export AUTOKERN_GRAPHS=on AUTOKERN_HOME=${AUTOKERN_HOME:-$OUT/home} PYTHONUNBUFFERED=1
export PYTHONPATH="$OUT/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -f "${RESUME:-}" ]; then tar xzf "$RESUME" -C "$OUT"; elif [ -n "${RESUME:-}" ]; then echo "no $RESUME in $PWD"; fi
# shellcheck disable=SC2086  # $PYTHON may be a command with arguments
$python calibration/entry_points.py "$OUT/site" || exit 2
whole=$($python -c 'from autokern.system import host; print(host.current().fingerprint)' | tail -n 1) || exit 2
here=${whole:0:8} # what was committed of this machine is not measured again
[ -e "$OUT/gpu.json" ] || cp calibration/gpu.json "$OUT"
mkdir -p "$AUTOKERN_HOME"
known=$(grep -l "\"$whole\"" calibration/hosts/*.json | head -n 1)
if [ -n "$known" ] && [ ! -e "$AUTOKERN_HOME/$whole.json" ]; then cp "$known" "$AUTOKERN_HOME/$whole.json"; fi
status=0
left() { echo $((${LIMIT:-530} - SECONDS)); }
# section NAME LEAST MOST WHEN COMMAND...: begun if LEAST seconds are left; ended after MOST; done if it succeeded
# (WHEN=succeeded), or when it has run, whatever came of it (WHEN=tried)
section() {
  local name=$1 least=$2 most=$3 when=$4 began=$SECONDS code
  shift 4
  if [ -e "$OUT/$name.$here.done" ]; then echo "== $name: done before"; return; fi
  if [ "$(left)" -lt "$least" ]; then echo "== $name: no time left, run again"; status=1; return; fi
  echo "== $name ($SECONDS s)"
  [ "$(left)" -lt "$most" ] && most=$(left)
  timeout -s INT -k 10 "$most" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  tail -n 15 "$OUT/$name.log"
  echo "   exit status $code after $((SECONDS - began)) s"
  if [ "$code" = 0 ] || [ "$when" = tried ]; then touch "$OUT/$name.$here.done"; else status=1; fi
}
rows() { # rows NAME LEAST MOST WHEN SECTION...: sections of gpu.py; whatever was measured is kept
  local name=$1 least=$2 most=$3 when=$4
  shift 4
  [ "$(left)" -lt "$most" ] && most=$(left)
  section "$name" "$least" "$most" "$when" \
    $python calibration/gpu.py --output "$OUT/gpu.json" --seconds "$((most - 20))" "$@"
}
section doctor 30 60 tried $python -m autokern doctor
# the tests for a GPU in four processes at once, none of them of several workers, where nothing may be recorded; beside
# them those of the peers, if $PEERS holds unpacked source distributions of linear_operator and gpytorch
section tests 60 170 tried bash -c 'one() { $0 -m pytest -q -m gpu -n 0 -rf --tb=short -p no:cacheprovider "$@"; }
  one tests --ignore tests/ops & one tests/ops -k float32 & one tests/ops -k float64 &
  one tests/ops -k "not float" &
  [ -d "${PEERS:-}" ] && $0 calibration/peers.py --workdir "$PEERS" -k cuda &
  wait' "$python"
section calibrate "$((${CALIBRATE:=140} + 20))" "$((CALIBRATE + 60))" tried \
  $python -m autokern calibrate --full --budget "$CALIBRATE" --output "$OUT/host.json"
if [ -e "$OUT/calibrate.$here.done" ]; then # what follows is chosen by what it measured
  rows steps 60 130 succeeded waits peaks steps fantasies inverses
  AUTOKERN_GRAPHS=off rows unrecorded 40 60 succeeded steps
  rows products 60 100 succeeded products
  rows some 50 70 tried crossovers
  rows programs 60 170 succeeded programs
  rows regret 60 100 succeeded regret
  section precision 100 130 tried $python calibration/study.py precision --device cuda --seconds 60 --output "$OUT/study.json"
  rows all 60 600 succeeded
  section rough 80 100 tried $python -m autokern calibrate --quick --accuracy approximate \
    --ops kernel_matmul,exact_log_prob,inv_quad_logdet --budget 50 --output "$OUT/host.json"
  section scaling 80 100 tried $python calibration/study.py scaling --device cuda --seconds 50 --output "$OUT/study.json"
fi
[ "$status" = 0 ] && echo "all is done"
if [ -n "${PACK:-}" ]; then
  packed=$(mktemp)
  tar czf "$packed" -C "$OUT" . && find "$OUT" -mindepth 1 -delete && mv "$packed" "$OUT/gpu.tgz"
fi
exit $status
