#!/usr/bin/env bash
# Fetch what a GPU machine lacks that has CPython 3.12, torch and pytest but no package registry: wheels in two folders
# that git should ignore, to be copied there with the repository. run.sh installs whatever it finds in them.
# Usage: benchmarks/bare_gpu/pack.sh [FOLDER]     makes FOLDER/.whl (engine, tests) and FOLDER/.whlserve (HTTP server)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$root}
python=${PYTHON:-python3}
engine=(msgspec pyzmq setproctitle gguf llguidance pytest-asyncio)
server=(fastapi starlette pydantic pydantic-core annotated-types typing-inspection uvicorn httptools opentelemetry-api)
options=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for tag in 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do options+=(--platform "manylinux_${tag}_x86_64"); done
options+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

fetch() { # FOLDER PACKAGE...
  local folder=$1 package pins=()
  shift
  for package in "$@"; do pins+=("$(grep "^$package==" "$root/constraints.txt")"); done
  rm -rf "$folder" && mkdir -p "$folder"
  "$python" -m pip download --quiet --disable-pip-version-check "${options[@]}" -d "$folder" "${pins[@]}"
}

fetch "$out/.whl" "${engine[@]}"
fetch "$out/.whlserve" "${server[@]}"
du -sh "$out/.whl" "$out/.whlserve"
