"""Quantized checkpoints of a real model on a CPU: speed beside the GGUF file they are made from, perplexity, a chat.

    PYTHONPATH=. python benchmarks/formats.py [--speed] [--perplexity] [--chat] [--tokens 2048] [--rounds 7]

The embedded SmolLM2-135M-Instruct (Q4_1) is dequantized, and stored again as W4A16 in groups of 64
(compressed-tensors), GPTQ, AWQ, FP8 in blocks of 128 x 128, and nf4: by rounding, without calibration, as
`tests/fakes` writes the layouts.
`--speed`: tokens/s of one sequence of 128 tokens, the fastest of several rounds that take turns. `--perplexity`: of the
checkpoint as it runs, in bfloat16, against its dequantized weights in float32. `--chat`: one greedy answer from each.
Without any of them: all three.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.perplexity import TEXT, Settings, token_losses
from pagemill import LLM, SamplingParams
from pagemill.artifacts.describe import locate
from pagemill.tokenizers.load import load_tokenizer
from tests.fakes.compressed_checkpoint import Layout, compress
from tests.fakes.stored_formats import Stored, awq, fp8, gptq, store, table_4bit

NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)  # fmt: skip
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda weight: gptq(weight, 4, 64)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 64}, lambda weight: awq(weight, 64)),
    "FP8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, (128, 128), "weight_scale_inv"),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda weight: table_4bit(weight, NF4, "nf4", False),
    ),
}
QUESTION = "What is the capital of France? Answer in one sentence."


def dequantized_folder(model: Path, folder: Path) -> Path:
    """The GGUF file as a folder of Hugging Face, in float32."""
    inside = {"gguf_file": model.name}
    transformers.AutoTokenizer.from_pretrained(model.parent, **inside).save_pretrained(folder)
    config = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, dtype=torch.float32, quantization_config=config, **inside
    )
    loaded.save_pretrained(folder)
    weights = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    return folder


def checkpoints(model: Path, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Format -> (stored, dequantized)."""
    plain = dequantized_folder(model, folder / "model")
    made = {"W4A16": compress(plain, folder / "W4A16", Layout(group_size=64))}
    for name, (config, quantize) in FORMATS.items():
        made[name] = store(plain, folder / name, config, quantize)
    for stored, _ in made.values():
        in_bfloat16(stored / "model.safetensors")
    return made


def in_bfloat16(path: Path) -> None:
    """Embeddings and norms, as checkpoints have them."""
    tensors = load_file(path)
    own = ("embed_tokens.weight", "norm.weight")
    save_file(
        {name: tensor.bfloat16() if name.endswith(own) else tensor for name, tensor in tensors.items()},
        path,
        {"format": "pt"},
    )


def speeds(models: dict[str, tuple[Path, str | None]], rounds: int) -> dict[str, float]:
    """Tokens/s of one sequence: the fastest of the rounds, in which the models take turns."""
    engines = {
        name: LLM(str(path), quantization=quantization, dtype="bfloat16", max_model_len=512)
        for name, (path, quantization) in models.items()
    }
    params = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)
    best = dict.fromkeys(engines, 0.0)
    for _ in range(rounds):
        for name, engine in engines.items():
            begin = time.perf_counter()
            engine.generate(["Once upon a time"], params, use_tqdm=False)
            best[name] = max(best[name], params.max_tokens / (time.perf_counter() - begin))
    return best


def show_speeds(gguf: Path, stored: Path, rounds: int) -> None:
    """A row for the GGUF file, and for W4A16 with its head as stored, and in 8 bits."""
    models: dict[str, tuple[Path, str | None]] = {
        "GGUF Q4_1": (gguf, None),
        "W4A16, head as stored (bfloat16)": (stored, None),
        "W4A16, head in 8 bits (--quantization int8)": (stored, "int8"),
        "W4A16, exact (--quantization none)": (stored, "none"),
    }
    found = speeds(models, rounds)
    base = found["GGUF Q4_1"]
    for name, speed in found.items():
        print(f"| {name} | {speed:.1f} tokens/s | {speed / base:.2f} |", flush=True)


def show_perplexities(made: dict[str, tuple[Path, Path]], num_tokens: int) -> None:
    """A row for each format."""
    for name, (stored, plain) in made.items():
        token_ids = load_tokenizer(stored).encode(TEXT.read_text())[:num_tokens]
        reference = token_losses(plain, Settings("float32", None), token_ids, 512, 1)
        for setting in (None, "int8"):
            losses = token_losses(stored, Settings("bfloat16", setting), token_ids, 512, 1)
            change = losses - reference
            percent = change.mean().expm1() * 100
            error = change.std() / len(change) ** 0.5 * 100
            print(
                f"| {name}{', head in 8 bits' if setting else ''} | {reference.mean().exp():.3f} | "
                f"{losses.mean().exp():.3f} | {percent:+.2f}% +- {error:.2f}% |",
                flush=True,
            )


def show_chats(made: dict[str, tuple[Path, Path]]) -> None:
    """A greedy answer from each."""
    for name, (stored, _) in made.items():
        engine = LLM(str(stored), dtype="bfloat16", max_model_len=512)
        answer = engine.chat(
            [{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=40, temperature=0), use_tqdm=False
        )
        print(f"| {name} | {answer[0].outputs[0].text!r} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text whose perplexity is measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are, or are made (default: temporary)")
    args = parser.parse_args()
    everything = not (args.speed or args.perplexity or args.chat)
    model = locate("smollm2")
    folder = args.folder or Path(tempfile.mkdtemp())
    try:
        names = ["W4A16", *FORMATS]
        if (folder / names[-1] / "plain").is_dir():
            made = {name: (folder / name / "packed", folder / name / "plain") for name in names}
        else:
            made = checkpoints(model, folder)
        if args.speed or everything:
            show_speeds(model, made["W4A16"][0], args.rounds)
        if args.perplexity or everything:
            show_perplexities(made, args.tokens)
        if args.chat or everything:
            show_chats(made)
    finally:
        if args.folder is None and folder.is_dir():
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
