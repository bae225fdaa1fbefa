#!/usr/bin/env bash
# Run tests and benchmarks on a GPU machine without an install step, and leave the results in $OUT (default: out).
#
#   benchmarks/bare_gpu/run.sh prepare              wheels and, if they are there, the reference's files; then versions
#   benchmarks/bare_gpu/run.sh tests [PYTEST ARGS]  tests/gpu
#   benchmarks/bare_gpu/run.sh rows ROWS [ARGS]     rows of benchmarks/gpu.py (comma-separated, or all)
#   benchmarks/bare_gpu/run.sh smoke                prepare, the quickest tests, the smoke row
#
# Every command prepares first what is not prepared yet, so that they can be chained. What it finds in the repository:
#   .whl .whlserve           wheels (see pack.sh)
#   .ref/*.tar.xz .refmoe/*  the reference engine: vllm (and vllm_moe), deps, fi (FlashInfer), as site-packages folders
#   .results/gpu.json        results of earlier runs, to be resumed
# SITE, REFERENCE and RESULTS name the folders that are made; NO_REFERENCE=1 leaves the reference out. LIBRARIES=1 lets
# our engine import attention libraries from the reference's folders (FlashInfer, FA3).
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
out=${OUT:-$root/out}
site=${SITE:-/tmp/pagemill-site}
reference=${REFERENCE:-/tmp/pagemill-reference}
results=${RESULTS:-/tmp/pagemill-results}
python=${PYTHON:-python3}
mkdir -p "$out" "$results"
export PYTHONPATH="$site:$root" PYTHONUNBUFFERED=1

prepare() {
  local wheels
  wheels=$(ls .whl/*.whl .whlserve/*.whl 2>/dev/null || true)
  if [[ -n $wheels && ! -e $site/.prepared ]]; then
    # shellcheck disable=SC2086
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
      --upgrade --target "$site" $wheels && touch "$site/.prepared" || exit 1
  fi
  [[ ${NO_REFERENCE:-} ]] && return
  unpack .ref/vllm.tar.xz vllm && unpack .ref/deps.tar.xz vllm && unpack .refmoe/vllm_moe.tar.xz vllm
  unpack .ref/fi.tar.xz fi
  if [[ ${LIBRARIES:-} ]]; then
    export PYTHONPATH="$site:$root:$reference/fi:$reference/vllm"
    export FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=16
  fi
}

unpack() { # ARCHIVE FOLDER
  local mark
  mark=$reference/.$(basename "$1")
  if [[ -e $1 && ! -e $mark ]]; then
    mkdir -p "$reference/$2" && tar -xJf "$1" -C "$reference/$2" && touch "$mark" || exit 1
    "$python" -m compileall -q -j 16 "$reference/$2" >/dev/null 2>&1
  fi
  return 0
}

versions() {
  "$python" - <<'EOF'
import importlib, platform, torch
found = {"python": platform.python_version(), "torch": torch.__version__}
for name in ("triton", "transformers", "msgspec", "zmq", "numpy"):
    try:
        found[name] = getattr(importlib.import_module(name), "__version__", "?")
    except ImportError as error:
        found[name] = str(error)
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(found, gpus)
EOF
}

run_tests() {
  local begin=$SECONDS
  "$python" -m pytest tests/gpu -m gpu -W default -p no:cacheprovider --durations=12 -rfEs --tb=short \
    --junitxml "$out/tests.xml" "$@" >"$out/tests.log" 2>&1
  local code=$?
  tail -n "${TAIL:-60}" "$out/tests.log"
  echo "tests: exit status $code after $((SECONDS - begin)) s"
  return $code
}

run_rows() { # ROWS [ARGS]
  local rows=$1 which=()
  shift
  if [[ $rows == all ]]; then which=(--all); else which=(--only "$rows"); fi
  [[ -e .results/gpu.json && ! -e $results/gpu.json ]] && cp .results/gpu.json "$results/gpu.json"
  if [[ -e $reference/.vllm.tar.xz && ! ${NO_REFERENCE:-} ]]; then
    which+=(--reference-path "$reference/vllm:$reference/fi")
  fi
  "$python" benchmarks/gpu.py "${which[@]}" --output-json "$results/gpu.json" "$@"
  local code=$?
  cp "$results/gpu.json" "$out/" 2>/dev/null
  tar -C "$results" -czf "$out/logs.tar.gz" gpu-logs 2>/dev/null
  return $code
}

command=${1:-}
[[ $# -gt 0 ]] && shift
case $command in
  prepare) prepare; versions; du -sh "$site" "$reference" 2>/dev/null ;;
  tests) prepare; run_tests "$@" ;;
  rows) prepare; run_rows "${@:?which rows}" ;;
  smoke)
    NO_REFERENCE=1
    prepare
    versions
    TAIL=30 run_tests -x -k smoke
    run_rows smoke --budget-s 180 "$@"
    ;;
  *) sed -n '2,17p' "$0"; exit 2 ;;
esac
