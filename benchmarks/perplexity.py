"""What the precision of weights and activations costs: perplexity on a fixed text, against the same weights in float32.

    PYTHONPATH=. python benchmarks/perplexity.py [--model FILE] [--types Q8_0 Q4_1] [--settings none auto int8]
        [--kv auto int8] [--shifts 4]

The text is chapters I and II of "Alice's Adventures in Wonderland" by Lewis Carroll (1865), in the public domain, read
in windows. `--types` also measures copies of a GGUF file whose matrices are stored in another type. Settings are values
of --quantization in bfloat16 (auto: as in the file); each row is compared with its own file dequantized in float32. The
error is that of the mean difference per token, one standard deviation. `--kv` names values of --kv-cache-dtype: a row
for each setting and each of them, and the reference keeps float32. `--shifts` repeats it in windows that begin
elsewhere, which averages what is chance in a token's context.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch

from pagemill import LLM, SamplingParams
from pagemill.artifacts.describe import locate
from pagemill.tokenizers.load import load_tokenizer

TEXT = Path(__file__).parent / "texts" / "alice.txt"
KV_CACHE_BYTES = 1 << 29
"""Of each engine: several are in one process."""


@dataclass(frozen=True)
class Settings:
    """One way to run a model."""

    dtype: str
    quantization: str | None
    kv_cache_dtype: str = "auto"
    device: str = "cpu"


def token_losses(path: Path, settings: Settings, token_ids: list[int], window: int, shifts: int) -> torch.Tensor:
    """`mean_losses`, by an engine."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(
        str(path),
        dtype=settings.dtype,
        max_model_len=2048,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        device=settings.device,
        max_num_seqs=1,
        enforce_eager=True,
    ) as engine:

        def losses(part: list[int]) -> torch.Tensor:
            (scored,) = engine.generate([{"prompt_token_ids": part}], params, use_tqdm=False)
            found = zip(part[1:], scored.prompt_logprobs[1:], strict=True)
            return -torch.tensor([of_token[token].logprob for token, of_token in found])

        return mean_losses(losses, token_ids, window, shifts)


def mean_losses(
    losses: Callable[[list[int]], torch.Tensor], token_ids: list[int], window: int, shifts: int
) -> torch.Tensor:
    """Negative log-likelihood of every token, the mean over the windows in which it has one before it. `losses`: tokens
    -> those of all but the first."""
    sums, counts = torch.zeros(len(token_ids)), torch.zeros(len(token_ids))
    for shift in range(shifts):
        bounds = sorted({0, *range(window * shift // shifts, len(token_ids), window), len(token_ids)})
        for begin, end in itertools.pairwise(bounds):
            sums[begin + 1 : end] += losses(token_ids[begin:end])
            counts[begin + 1 : end] += 1
    return sums[counts > 0] / counts[counts > 0]


def stored_as(path: Path, type_name: str, folder: Path) -> Path:
    """A copy of a GGUF file whose quantized matrices are of another type."""
    kind, reader = gguf.GGMLQuantizationType[type_name], gguf.GGUFReader(path)
    copy = folder / f"{path.stem}.{type_name}.gguf"
    writer = gguf.GGUFWriter(copy, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        matrix = tensor.tensor_type not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        wanted = kind if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


def measure(path: Path, settings: list[str], kv_dtypes: list[str], window: int, shifts: int) -> None:
    """Print a row for each of the settings and types of the cache."""
    token_ids = load_tokenizer(path).encode(TEXT.read_text())
    reference = token_losses(path, Settings("float32", "none"), token_ids, window, shifts)
    print(f"{path.name}: {len(token_ids)} tokens, perplexity in float32 {reference.mean().exp():.4f}")
    for name, kv_dtype in itertools.product(settings, kv_dtypes):
        quantization = None if name == "auto" else name
        losses = token_losses(path, Settings("bfloat16", quantization, kv_dtype), token_ids, window, shifts)
        change = losses - reference
        percent, error = change.mean().expm1() * 100, change.std() / len(change) ** 0.5 * 100
        title = f"{name:5}" + ("" if kv_dtype == "auto" else f" KV {kv_dtype}")
        print(f"  {title} perplexity {losses.mean().exp():.4f}, {percent:+.3f}% +- {error:.3f}%", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="alias, folder or GGUF file")
    parser.add_argument("--types", nargs="*", default=[], help="types to store copies of a GGUF file in")
    parser.add_argument("--settings", nargs="*", default=["none", "auto"], help="values of --quantization; auto")
    parser.add_argument("--kv", nargs="*", default=["auto"], help="values of --kv-cache-dtype")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--shifts", type=int, default=1, help="repetitions in windows that begin elsewhere")
    args = parser.parse_args()
    path = locate(args.model)
    measure(path, args.settings, args.kv, args.window, args.shifts)
    with tempfile.TemporaryDirectory() as folder:
        for type_name in args.types:
            measure(stored_as(path, type_name, Path(folder)), args.settings, args.kv, args.window, args.shifts)


if __name__ == "__main__":
    main()
