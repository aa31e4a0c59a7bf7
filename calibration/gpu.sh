#!/usr/bin/env bash
# One call on a machine with a GPU: GPU tests, a full calibration, the study of choices, real models off and on.
# Everything it finds lies under $OUT (default: ./out). Resumable: what stands there is not measured again, and after
# $LIMIT seconds (default 530) no section is begun: run it again until it says that all is done. Where a call starts with
# an empty $OUT, PACK=1 leaves one file there, gpu.tgz, and RESUME=gpu.tgz goes on from it.
# Needs no network; works with an uninstalled checkout, if the dependencies can be imported.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${OUT:=out}"
OUT=$(cd "$OUT" && pwd)
export AUTOKERN_GRAPHS=on PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 AUTOKERN_HOME=${AUTOKERN_HOME:-$OUT/home}
[ -f "${RESUME:-}" ] && tar xzf "$RESUME" -C "$OUT"
status=0
section() {
  local name=$1 limit=$2 left=$((${LIMIT:-530} - SECONDS))
  shift 2
  if [ -e "$OUT/$name.done" ]; then echo "== $name: done before"; return; fi
  if [ "$left" -lt 30 ]; then echo "== $name: no time left, run again"; status=1; return; fi
  echo "== $name ($SECONDS s)"
  [ "$left" -lt "$limit" ] && limit=$left
  if timeout "$limit" "$@" >"$OUT/$name.log" 2>&1; then touch "$OUT/$name.done"; else status=1; echo "   failed or out of time"; fi
  tail -n 15 "$OUT/$name.log"
}
section doctor 60 python -m autokern doctor
section tests 120 python -m pytest -m gpu -p no:cacheprovider tests
section calibrate 200 python -m autokern calibrate --full --budget 170 --output "$OUT/host.json"
section rough 60 python -m autokern calibrate --quick --accuracy approximate --ops kernel_matmul,exact_log_prob,inv_quad_logdet --budget 50 --output "$OUT/host.json"
for study in precision:100 choices:320 scaling:90 product_regret:90 products:300; do
  name=${study%:*} limit=${study#*:}
  section "$name" "$limit" python calibration/study.py "$name" --device cuda --seconds $((limit * 2 / 3)) --output "$OUT/study.json"
done
section end_to_end 150 python calibration/end_to_end.py --quick --output-dir "$OUT" training diabetes co2 cg posterior fantasies acquisition
if [ -d "${PEERS:-}" ]; then # unpacked source distributions of linear_operator and gpytorch: there is no network
  section peers 180 python calibration/peers.py --workdir "$PEERS" -k cuda
fi
[ "$status" = 0 ] && echo "all is done"
if [ -n "${PACK:-}" ]; then
  packed=$(mktemp)
  tar czf "$packed" -C "$OUT" . && find "$OUT" -mindepth 1 -delete && mv "$packed" "$OUT/gpu.tgz"
fi
exit $status
