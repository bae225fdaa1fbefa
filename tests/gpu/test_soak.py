"""Random arrivals and aborts for a while: everything that was not aborted is answered, and all blocks end free.

SOAK_S sets how long (default: 15 seconds).
"""

import asyncio
import contextlib
import os
import random

import pytest

from pagemill import SamplingParams
from pagemill.config.arguments import EngineArgs
from pagemill.launch import build_inproc
from tests.gpu.engines import make_prompts

SOAK_S = float(os.environ.get("SOAK_S", "15"))
NUM_CLIENTS = 48


class Traffic:
    """Clients that ask, and sometimes leave in the middle."""

    def __init__(self, llm, seconds: float) -> None:
        self._llm = llm
        self._rng = random.Random(11)
        self._prompts = make_prompts(64, longest=500, seed=12)
        self._until = asyncio.get_running_loop().time() + seconds
        self.num_finished = 0
        self.num_aborted = 0

    async def client(self) -> None:
        """One request after the other until the time is over."""
        rng = self._rng
        while asyncio.get_running_loop().time() < self._until:
            params = SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                top_k=rng.choice((0, 1, 40)),
                top_p=rng.choice((1.0, 0.9)),
                max_tokens=rng.randint(1, 150),
                ignore_eos=True,
                detokenize=False,
            )
            prompt = list(rng.choice(self._prompts))[: rng.randint(1, 500)]
            patience = rng.randint(1, 100) if rng.random() < 0.4 else None
            await self._ask(prompt, params, patience)
            await asyncio.sleep(rng.choice((0, 0, 0.02)))

    async def _ask(self, prompt: list[int], params: SamplingParams, patience: int | None) -> None:
        last = None
        async with contextlib.aclosing(self._llm.generate({"prompt_token_ids": prompt}, params)) as outputs:
            async for last in outputs:
                if patience is not None and len(last.outputs[0].token_ids) >= patience and not last.finished:
                    self.num_aborted += 1
                    return
        assert last is not None and last.finished
        assert len(last.outputs[0].token_ids) == params.max_tokens
        self.num_finished += 1


@pytest.mark.timeout(SOAK_S + 300)
async def test_random_aborts_leave_nothing_behind(checkpoints):
    args = EngineArgs(
        checkpoints.path("LlamaForCausalLM"),
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=32,
        max_model_len=700,
        num_gpu_blocks_override=400,
        disable_log_stats=True,
    )
    llm = build_inproc(args).llm
    try:
        traffic = Traffic(llm, SOAK_S)
        await asyncio.gather(*(traffic.client() for _ in range(NUM_CLIENTS)))
        assert traffic.num_finished > 20 and traffic.num_aborted > 5
        await asyncio.sleep(0.5)  # the last aborts
        assert await llm.reset_prefix_cache(), "blocks are still in use"
        llm._client._core.check_integrity()
        stats = llm._client.stats()[0]
        assert (stats.num_running, stats.num_waiting) == (0, 0)
    finally:
        await llm.shutdown()
