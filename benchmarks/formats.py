"""Quantized checkpoints of a real model on a CPU: speed beside the GGUF file they are made from, perplexity, a chat.

    PYTHONPATH=. python benchmarks/formats.py --folder DIR --format W4A16 --measure perplexity chat
    PYTHONPATH=. python benchmarks/formats.py --folder DIR --format W4A16 --measure speed [--rounds 7]
    PYTHONPATH=. python benchmarks/formats.py --folder DIR --table

The embedded SmolLM2-135M-Instruct (Q4_1) is dequantized, and stored again as W4A16 in groups of 64
(compressed-tensors), GPTQ, AWQ, FP8 in blocks of 128 x 128, and nf4: by rounding, without calibration, as
`tests/fakes` writes the layouts. A call measures one format, and adds to DIR/results.json what it finds; `--table`
prints what is there. Checkpoints are made in DIR when they are first needed.

speed: tokens/s of one sequence of 128 tokens, the fastest of several rounds in which it and the GGUF file take turns,
with the head as it is stored, and in 8 bits. perplexity: of the checkpoint as it runs, in bfloat16, against its
dequantized weights in float32. chat: a greedy answer.
"""

import argparse
import json
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
BF16 = "bfloat16"
NAMES = (BF16, "W4A16", *FORMATS)
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


def checkpoint(model: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """(stored, dequantized), made where they are not there yet."""
    stored, plain = folder / name / "packed", folder / name / "plain"
    done = folder / f"{name}.made"
    if done.exists():
        return stored, plain
    source = folder / "model"
    if not (folder / "model.made").exists():
        dequantized_folder(model, source)
        (folder / "model.made").touch()
    if name == BF16:
        return source, source
    if name == "W4A16":
        compress(source, folder / name, Layout(group_size=64))
    else:
        store(source, folder / name, *FORMATS[name])
    in_bfloat16(stored / "model.safetensors")
    done.touch()
    return stored, plain


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


def measure_speed(gguf: Path, stored: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s, of the checkpoint and of the GGUF file in the same call."""
    found = speeds({"Q4_1": (gguf, None), "stored": (stored, None), "int8": (stored, "int8")}, args.rounds)
    return {"speed": found}


def measure_perplexity(stored: Path, plain: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Of the dequantized weights, and what the checkpoint's is above it in percent, with one standard deviation."""
    token_ids = load_tokenizer(plain).encode(TEXT.read_text())[: args.tokens]
    reference = token_losses(plain, Settings("float32", None), token_ids, args.window, args.shifts)
    found: dict[str, Any] = {"perplexity": float(reference.mean().exp()), "tokens": len(token_ids)}
    for name, setting in (("stored", None), ("int8", "int8")):
        change = token_losses(stored, Settings("bfloat16", setting), token_ids, args.window, args.shifts) - reference
        percent, error = change.mean().expm1() * 100, change.std() / len(change) ** 0.5 * 100
        found[f"{name} percent"] = [float(percent), float(error)]
    return found


def measure_chat(stored: Path) -> dict[str, Any]:
    """A greedy answer."""
    engine = LLM(str(stored), dtype="bfloat16", max_model_len=512)
    answer = engine.chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=40, temperature=0), use_tqdm=False
    )
    return {"chat": answer[0].outputs[0].text}


def table(results: dict[str, dict[str, Any]]) -> None:
    """A row for each format; what has not been measured is a dash."""
    print("| format | perplexity | as it runs | head in 8 bits | speed, of Q4_1 | head in 8 bits | answer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in (name for name in NAMES if name in results):
        row = results[name]
        cells = [name, f"{row['perplexity']:.3f}" if "perplexity" in row else "-"]
        for key in ("stored percent", "int8 percent"):
            cells.append("{:+.2f}% +- {:.2f}%".format(*row[key]) if key in row else "-")
        speed = row.get("speed")
        cells += [f"{speed[key] / speed['Q4_1']:.2f}" if speed else "-" for key in ("stored", "int8")]
        print("|", " | ".join([*cells, row.get("chat", "-").strip()]), "|")


def main() -> None:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and results are, or are made")
    parser.add_argument("--format", choices=NAMES, help="the one to measure")
    parser.add_argument("--measure", nargs="+", choices=("speed", "perplexity", "chat"), default=[])
    parser.add_argument("--table", action="store_true", help="print what has been measured")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text whose perplexity is measured")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--shifts", type=int, default=1, help="repetitions in windows that begin elsewhere")
    parser.add_argument("--rounds", type=int, default=7, help="of the speeds, in which the models take turns")
    args = parser.parse_args()
    if bool(args.format) != bool(args.measure) or not (args.format or args.table):
        parser.error("give --format and --measure, or --table")
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    if args.format:
        model = locate("smollm2")
        stored, plain = checkpoint(model, args.folder, args.format)
        row = results.setdefault(args.format, {})
        for what in args.measure:
            if what == "perplexity":
                row |= measure_perplexity(stored, plain, args)
            else:
                row |= measure_chat(stored) if what == "chat" else measure_speed(model, stored, args)
            kept.write_text(json.dumps(results, indent=1))
        print(json.dumps({args.format: row}, indent=1))
    if args.table:
        table(results)


if __name__ == "__main__":
    main()
