"""The default model's GGUF file as a bfloat16 folder that transformers and vLLM read: python convert.py FILE FOLDER.

Runs in the peers' environment, not in ours.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
options = {"gguf_file": source.name}
weights = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
AutoModelForCausalLM.from_pretrained(source.parent, **options, **weights).to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(target)
