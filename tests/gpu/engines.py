"""Engines on the GPU for tests, and what their tokens are held against: transformers in float32 on the same weights.

Two ways of computing the same model in bfloat16 choose different tokens where two logits nearly tie, and from there on
write different texts. So a text is judged token by token, given its own beginning: its regret is how much larger the
reference's best logit was than that of the token that was chosen, in standard deviations of the logits. Choosing tokens
at random costs about 3.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pagemill import LLM, SamplingParams
from pagemill.errors import ConfigError

MAX_REGRET = {"float32": 0.01, "bfloat16": 0.12, "fp8": 0.5}
"""What rounding explains. Triton multiplies float32 as tf32 unless told otherwise."""
MEAN_SHARE = 0.02
"""The mean over all tokens is at most this share of that: most tokens are the best."""
KV_BYTES = 256 << 20
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64]


class Reference:
    """A model in transformers, float32, on the GPU."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval().to("cuda")

    @torch.inference_mode()
    def regrets(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens)] float32 on the CPU."""
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        logits = self._model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        return ((logits.amax(-1) - chosen) / logits.std(-1)).cpu()

    def check(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], dtype: str) -> None:
        """Fail when a greedy output holds a token that rounding does not explain."""
        everything = []
        for index, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            regrets = self.regrets(prompt, tokens)
            everything.append(regrets)
            worst = int(regrets.argmax())
            assert regrets[worst] <= MAX_REGRET[dtype], (
                f"request {index} of {len(prompts)}, {len(prompt)} tokens in: output token {worst} has a regret of "
                f"{regrets[worst]:.3f}; all: {[round(float(each), 3) for each in regrets]}"
            )
        mean = float(torch.cat(everything).mean())
        assert mean <= MAX_REGRET[dtype] * MEAN_SHARE, f"the mean regret is {mean:.4f}"


def check_regrets(
    reference: Reference, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], most: float, mean: float
) -> None:
    """Fail when a greedy output holds a token with a regret above `most`, or the mean of all is above `mean`."""
    found = [reference.regrets(prompt, tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]
    regrets = torch.cat(found)
    assert float(regrets.max()) <= most, [round(float(part.max()), 3) for part in found]
    assert float(regrets.mean()) <= mean


def need_gpus(count: int) -> None:
    """Skip where there are fewer."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs are needed, {torch.cuda.device_count()} are here")


def make_llm(folder: str, **settings: Any) -> LLM:
    """An engine on the GPU with a small cache; skips when this machine or build lacks what the settings name."""
    defaults = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "kv_cache_memory_bytes": KV_BYTES}
    try:
        return LLM(folder, **(defaults | settings))
    except ConfigError as error:
        if settings.get("attention_backend"):
            pytest.skip(f"{settings['attention_backend']}: {error}")
        raise


def graph_settings(mode: str) -> dict[str, Any]:
    """Settings for a graph mode, or for "eager"."""
    if mode == "eager":
        return {"enforce_eager": True}
    return {"compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": CAPTURE_SIZES}}


def make_prompts(count: int, longest: int = 200, seed: int = 0) -> list[list[int]]:
    """Random token ids, lengths from 1 to `longest`."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 259) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    """Parameters of a request that generates exactly this many tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def sampled(num_tokens: int, seed: int) -> SamplingParams:
    """The same, drawn with a seed."""
    return SamplingParams(
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        seed=seed,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
    )


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """The tokens of each request."""
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def share_equal(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Share of requests whose outputs are identical."""
    return sum(list(a) == list(b) for a, b in zip(left, right, strict=True)) / len(left)
