"""Quantized checkpoints of a real model on a CPU or GPU: speed beside the GGUF file they come from, perplexity, a chat.

    PYTHONPATH=. python benchmarks/formats.py --folder DIR --format W4A16 --measure perplexity chat
    PYTHONPATH=. python benchmarks/formats.py --folder DIR --format W4A16 --measure speed [--rounds 7]
    PYTHONPATH=. python benchmarks/formats.py --folder DIR --format "GPTQ in order" --measure speed --beside GPTQ
    PYTHONPATH=. python benchmarks/formats.py --folder DIR --table

The embedded SmolLM2-135M-Instruct (Q4_1) is dequantized, and stored again by rounding, without calibration: by
compressed-tensors as W4A16 and W8A16 in groups of 64, W8A8 and FP8 (static, dynamic, in blocks of 128 x 128), whose
dequantized weights are what that library decompresses; as GPTQ (in order: with desc_act, inputs dealt out over groups
at random), AWQ and nf4, as `tests/fakes` writes the layouts. A call measures one format, and adds to DIR/results.json
what it finds; `--table` prints what is there. Checkpoints are made in DIR when they are first needed (`--measure` with
nothing behind it makes one, and no more).

speed: tokens/s of one sequence of 128 tokens without drafts, against those of the GGUF file in the same round, of
which the median is taken, with the head as it is stored, and in 8 bits. perplexity: of the checkpoint as it runs, in
bfloat16, against its dequantized weights in float32. inputs: what it changes by where inputs are rounded as well, by
the library that publishes the format and in float32. chat: three turns of greedy answers, and how many of their tokens
the dequantized weights in bfloat16 find the likeliest after the same text.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    fake_quantize,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.perplexity import KV_CACHE_BYTES, TEXT, Settings, mean_losses, token_losses
from pagemill import LLM, SamplingParams
from pagemill.artifacts.describe import locate
from pagemill.model.kernels.linear_int import NF4_LEVELS
from pagemill.tokenizers.load import load_tokenizer
from tests.fakes.stored_formats import Stored, awq, gptq, store, table_4bit

PRESETS = {
    "W4A16": ("W4A16", "pack-quantized"),
    "W8A16": ("W8A16", "pack-quantized"),
    "W8A8": ("W8A8", "int-quantized"),
    "FP8 static": ("FP8", "float-quantized"),
    "FP8 dynamic": ("FP8_DYNAMIC", "float-quantized"),
    "FP8 blocks": ("FP8_BLOCK", "float-quantized"),
}
"""Of compressed-tensors, with the format that they are stored in."""
GROUP_SIZE = 64
"""Of W4A16 and W8A16: 576 inputs are nine of them."""
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda weight: gptq(weight, 4, 64)),
    "GPTQ in order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        lambda weight: gptq(weight, 4, 64, ordered=True),
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 64}, lambda weight: awq(weight, 64)),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda weight: table_4bit(weight, torch.tensor(NF4_LEVELS), "nf4", False),
    ),
}
BF16 = "bfloat16"
NAMES = (BF16, *PRESETS, *FORMATS)
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Which river flows through it?",
    "Tell me two things that one can see there.",
)
ANSWER_TOKENS = 40


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
    if name in PRESETS:
        store_with_library(source, folder / name, *PRESETS[name])
    else:
        store(source, folder / name, *FORMATS[name])
    in_bfloat16(stored / "model.safetensors")
    done.touch()
    return stored, plain


def store_with_library(source: Path, to: Path, preset: str, format_name: str) -> None:
    """A preset of compressed-tensors: compressed by that library, and what it makes of that again."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = GROUP_SIZE
    library = BaseCompressor.get_value_from_registry(format_name)

    def compressed(weight: Tensor) -> Stored:
        stored = library.compress(parameters(weight, scheme), scheme)
        wanted = library.decompress(dict(stored), scheme)["weight"]
        if preset == "FP8":
            stored["input_scale"] = torch.ones(1)  # which is not used
        return stored, wanted

    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format_name, ignore=["lm_head"])
    store(source, to, config.model_dump(mode="json") | {"quantization_status": "compressed"}, compressed)


def parameters(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """The weight, with scales and zero points by its largest values, as the library finds them."""
    args = scheme.weights
    strategy = str(args.strategy)
    groups, dims = weight, (0, 1)
    if strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
        groups, dims = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)), (1, 3)
    elif strategy != "tensor":
        size = args.group_size if args.group_size and args.group_size > 0 else weight.shape[1]
        groups, dims = weight.unflatten(1, (-1, size)), (2,)
    scales, zeros = calculate_qparams(groups.amin(dims), groups.amax(dims), args)
    if strategy == "tensor":
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    return {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}


def in_bfloat16(path: Path) -> None:
    """Embeddings and norms, as checkpoints have them."""
    tensors = load_file(path)
    own = ("embed_tokens.weight", "norm.weight")
    save_file(
        {name: tensor.bfloat16() if name.endswith(own) else tensor for name, tensor in tensors.items()},
        path,
        {"format": "pt"},
    )


def speeds(models: dict[str, tuple[Path, str | None]], rounds: int, device: str) -> dict[str, list[float]]:
    """Tokens/s of one sequence in each of the rounds, in which the models take turns."""
    drafts = {"method": "none"}  # how many are right depends on what a model says
    engines = {
        name: LLM(
            str(path),
            quantization=quantization,
            max_model_len=512,
            max_num_seqs=1,
            speculative_config=drafts,
            **_on(device),
        )
        for name, (path, quantization) in models.items()
    }
    params = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            begin = time.perf_counter()
            engine.generate(["Once upon a time"], params, use_tqdm=False)
            if number:  # the first is for warming up
                found[name].append(params.max_tokens / (time.perf_counter() - begin))
    return found


def measure_speed(gguf: Path, stored: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s, of the checkpoint and of the GGUF file in the same call, and the medians of their ratios; beside those
    of another format, where one is named."""
    models = {"Q4_1": (gguf, None), "stored": (stored, None), "int8": (stored, "int8")}
    if args.beside:
        models = {"stored": (stored, None), "beside": (checkpoint(gguf, args.folder, args.beside)[0], None)}
    found = speeds(models, args.rounds, args.device)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    if args.beside:
        return {"beside": {args.beside: _ratio(found["stored"], found["beside"]), "speed": medians}}
    return {"speed": medians, "ratio": {name: _ratio(found[name], found["Q4_1"]) for name in found}}


def _on(device: str) -> dict[str, Any]:
    """Settings of all engines but those of perplexity."""
    return {"dtype": "bfloat16", "device": device, "kv_cache_memory_bytes": KV_CACHE_BYTES}


def _ratio(rates: list[float], of: list[float]) -> float:
    return statistics.median(one / base for one, base in zip(rates, of, strict=True))


def measure_perplexity(stored: Path, plain: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Of the dequantized weights, and what the checkpoint's is above it in percent, with one standard deviation."""
    token_ids = load_tokenizer(plain).encode(TEXT.read_text())[: args.tokens]
    exact = Settings("float32", None, device=args.device)
    reference = token_losses(plain, exact, token_ids, args.window, args.shifts)
    found: dict[str, Any] = {"perplexity": float(reference.mean().exp()), "tokens": len(token_ids)}
    for name, setting in (("stored", None), ("int8", "int8")):
        settings = Settings("bfloat16", setting, device=args.device)
        change = token_losses(stored, settings, token_ids, args.window, args.shifts) - reference
        percent, error = change.mean().expm1() * 100, change.std() / len(change) ** 0.5 * 100
        found[f"{name} percent"] = [float(percent), float(error)]
    return found


def measure_inputs(plain: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the library's own way with inputs adds to the perplexity of its dequantized weights, all else in float32."""
    quantized = preset_name_to_scheme(PRESETS[args.format][0], ["Linear"]).input_activations
    if quantized is None or not quantized.dynamic:
        raise SystemExit(f"{args.format}: inputs are not quantized as they come")
    token_ids = load_tokenizer(plain).encode(TEXT.read_text())[: args.tokens]
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    @torch.inference_mode()
    def losses(part: list[int]) -> Tensor:
        logits = model(torch.tensor([part])).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none")

    exact = mean_losses(losses, token_ids, args.window, args.shifts)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda layer, inputs: (rounded_as(quantized, layer, inputs[0]),))
    change = mean_losses(losses, token_ids, args.window, args.shifts) - exact
    return {"inputs percent": [float(change.mean().expm1() * 100), float(change.std() / len(change) ** 0.5 * 100)]}


def rounded_as(args: QuantizationArgs, layer: torch.nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of a layer, as the library rounds them."""
    scale, zero_point = compute_dynamic_scales_and_zp(inputs, args, layer)
    rounded: Tensor = fake_quantize(inputs, scale, zero_point, args)
    return rounded


def measure_chat(stored: Path, plain: Path, device: str) -> dict[str, Any]:
    """Greedy answers, and how many of their tokens are those of the dequantized weights."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    told: list[dict[str, str]] = []
    read = []
    with LLM(str(stored), max_model_len=1024, **_on(device)) as engine:
        for question in QUESTIONS:
            told.append({"role": "user", "content": question})
            answer = engine.chat(told, params, use_tqdm=False)[0]
            told.append({"role": "assistant", "content": answer.outputs[0].text})
            read.append((list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)))
    likeliest = SamplingParams(max_tokens=1, temperature=0)
    agreed = 0
    with LLM(str(plain), max_model_len=1024, **_on(device)) as other:
        for prompt, tokens in read:
            texts = [{"prompt_token_ids": prompt + tokens[:count]} for count in range(len(tokens))]
            found = [result.outputs[0].token_ids[0] for result in other.generate(texts, likeliest, use_tqdm=False)]
            agreed += sum(one == token for one, token in zip(found, tokens, strict=True))
    total = sum(len(tokens) for _, tokens in read)
    return {"chat": [turn["content"] for turn in told[1::2]], "agreed": [agreed, total]}


def table(results: dict[str, dict[str, Any]]) -> None:
    """A row for each format; what has not been measured is a dash."""
    print("| format | perplexity | as it runs | head in 8 bits | speed, of Q4_1 | head in 8 bits | same tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in (name for name in NAMES if name in results):
        row = results[name]
        cells = [name, f"{row['perplexity']:.3f}" if "perplexity" in row else "-"]
        for key in ("stored percent", "int8 percent"):
            cells.append("{:+.2f}% +- {:.2f}%".format(*row[key]) if key in row else "-")
        cells += [f"{row['ratio'][key]:.2f}" if "ratio" in row else "-" for key in ("stored", "int8")]
        cells.append("{} of {}".format(*row["agreed"]) if "agreed" in row else "-")
        print("|", " | ".join(cells), "|")
    for name in (name for name in NAMES if "chat" in results.get(name, {})):
        print(f"\n{name}:", *(f"  {answer.strip()!r}" for answer in results[name]["chat"]), sep="\n")


def main() -> None:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and results are, or are made")
    parser.add_argument("--format", choices=NAMES, help="the one to measure")
    parser.add_argument("--measure", nargs="*", choices=("speed", "perplexity", "inputs", "chat"), default=None)
    parser.add_argument("--table", action="store_true", help="print what has been measured")
    parser.add_argument(
        "--beside", choices=NAMES, help="measure speed against that of this format, not of the GGUF file"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the text whose perplexity is measured")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--shifts", type=int, default=1, help="repetitions in windows that begin elsewhere")
    parser.add_argument("--rounds", type=int, default=7, help="of the speeds, in which the models take turns")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if bool(args.format) != (args.measure is not None) or not (args.format or args.table):
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
            elif what == "inputs":
                row |= measure_inputs(plain, args)
            else:
                chat = what == "chat"
                row |= measure_chat(stored, plain, args.device) if chat else measure_speed(model, stored, args)
            kept.write_text(json.dumps(results, indent=1))
        print(json.dumps({args.format: row}, indent=1))
    if args.table:
        table(results)


if __name__ == "__main__":
    main()
