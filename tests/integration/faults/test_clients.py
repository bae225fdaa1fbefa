"""Clients that go away, whatever they asked for and whenever; and many that do not: nothing is left of any."""

import asyncio
import random

import httpx
import psutil

from tests.integration.faults.lab import LONG, Server
from tests.integration.faults.traffic import Traffic, ask_all, asks, same

NUM_DISCONNECTS = 1000 if LONG else 100
NUM_REQUESTS = 20_000 if LONG else 500
NUM_REFUSED_ROUNDS = 200 if LONG else 6
"""Of one request of each kind."""
MAX_SLOPE = 1.0
"""MB per 1,000 requests."""


async def leave_at_random(server, rng, number):
    """One client that does not wait for its answer."""
    request = {
        "prompt": [3 + rng.randrange(200) for _ in range(rng.randrange(1, 60))],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": number % 2 == 0,
        "n": rng.choice([1, 1, 3]),
    }
    async with Traffic(server, [request]) as traffic:
        if request["stream"] and rng.random() < 0.5:
            await traffic.until(rng.randrange(1, 20))
        else:
            await asyncio.sleep(rng.random() * 0.3)
        assert traffic.is_running()


async def test_disconnects_free_everything(checkpoint):
    """With 8 running at most, most of them leave while they are queued."""
    arguments = ("--max-num-seqs", 8, "--num-gpu-blocks-override", 800)
    with Server(checkpoint, *arguments, scripted=True, LAB_STEP_S=0.002) as server:
        requests = asks(8, max_tokens=30)
        calm = await ask_all(server, requests)
        rng = random.Random(5)
        for start in range(0, NUM_DISCONNECTS, 50):
            batch = (leave_at_random(server, rng, number) for number in range(start, start + 50))
            with server.pace(0.02):  # so that nobody is answered before it leaves
                await asyncio.gather(*batch)
        server.wait_empty()
        figures = server.figures()
        assert (figures["in_flight"], figures["remembered"]) == (0, 0)
        assert same(await ask_all(server, requests), calm)
        assert "Traceback" not in server.log
        assert server.log.count("engine core 0 is gone") == 0


async def test_memory_stays_flat(checkpoint):
    with Server(checkpoint, "--num-gpu-blocks-override", 500, scripted=True) as server:
        processes = [psutil.Process(server.process.pid), psutil.Process(server.pid("engine core 0"))]
        rng = random.Random(6)
        samples = []
        # Idle connections are given up before the server closes them after 5 s, when a request may be on its way.
        limits = httpx.Limits(keepalive_expiry=2)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:

            async def ask():
                prompt = [3 + rng.randrange(200) for _ in range(rng.randrange(1, 40))]
                body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": rng.random() < 0.5}
                (await client.post(server.url + "/v1/completions", json=body)).raise_for_status()

            for done in range(0, NUM_REQUESTS, 50):
                await asyncio.gather(*(ask() for _ in range(50)))
                samples.append((done + 50, sum(process.memory_info().rss for process in processes) / 1e6))
        settled = samples[len(samples) // 2 :]
        slope = slope_of(settled) * 1000
        grown = settled[-1][1] - settled[0][1]
        print(f"RSS {samples[0][1]:.1f} to {samples[-1][1]:.1f} MB over {NUM_REQUESTS} requests; {slope:+.2f} MB/1,000")
        if LONG:
            assert slope < MAX_SLOPE
        assert grown < (10 if LONG else 30)
        server.wait_empty()


TEXT = "t3 " * 33_000
"""Makes a body of 100 KB."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": TEXT}]
WRONG = {"no": "such value"}
FIELDS = (
    *("allowed_token_ids", "bad_words", "best_of", "chat_template", "documents", "frequency_penalty", "functions"),
    *("guided_json", "logit_bias", "logprobs", "max_tokens", "min_p", "min_tokens", "modalities", "n", "prompt_embeds"),
    *("prompt_logprobs", "repetition_penalty", "response_format", "seed", "stop", "stop_token_ids", "stream"),
    *("structured_outputs", "suffix", "temperature", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens"),
)
REFUSED = [
    *((COMPLETIONS, {"prompt": TEXT, field: WRONG}, 400) for field in FIELDS),
    *((CHAT, {"messages": MESSAGES, field: WRONG}, 400) for field in FIELDS if field != "suffix"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, 400),
    (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"no_such_option": True}}, 400),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}], "tool_choice": WRONG}, 400),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "t3"}] * 5000}, 400),
    (CHAT, {"messages": [{"role": "no such role", "content": TEXT}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": TEXT}}]}]}, 400),
    (COMPLETIONS, {"prompt": [TEXT, 1]}, 400),
    (COMPLETIONS, {"prompt": ["t3"] * 5000}, 400),
    (COMPLETIONS, {"prompt": [10**6] * 30_000}, 400),
    (COMPLETIONS, {"prompt": TEXT}, 400),
    (COMPLETIONS, {"prompt": TEXT, "model": "no such model"}, 404),
    (COMPLETIONS, ["not", "an", "object", TEXT], 400),
    ("/no/such/route", {"prompt": TEXT}, 404),
    ("/health", {"prompt": TEXT}, 405),
]
"""(path, body, status)."""


async def test_refused_requests_leave_nothing(checkpoint):
    """Whatever is wrong with them, and however large their bodies are."""
    with Server(checkpoint, "--num-gpu-blocks-override", 500, scripted=True) as server:
        samples = []
        async with httpx.AsyncClient(timeout=300) as client:
            for done in range(NUM_REFUSED_ROUNDS):
                for path, body, status in REFUSED:
                    answer = await client.post(server.url + path, json=body)
                    assert answer.status_code == status, (path, list(body)[-1], answer.text)
                for content in (
                    b"{" + TEXT.encode(),
                    b'{"prompt": "' + TEXT.encode(),
                    b"\xff" * 100_000,
                    b"[" * 100_000,
                ):
                    headers = {"content-type": "application/json"}
                    answer = await client.post(server.url + COMPLETIONS, content=content, headers=headers)
                    assert answer.status_code == 400
                rss = sum(process.memory_info().rss for process in server.tree())  # bodies go to helpers, too
                samples.append(((done + 1) * (len(REFUSED) + 4), rss / 1e6))
        settled = samples[len(samples) // 3 :]
        slope = slope_of(settled) * 1000
        grown = settled[-1][1] - settled[0][1]
        print(
            f"RSS {samples[0][1]:.1f} to {samples[-1][1]:.1f} MB over {samples[-1][0]} refused; {slope:+.2f} MB/1,000"
        )
        if LONG:
            assert slope < MAX_SLOPE
        assert grown < (10 if LONG else 30)
        assert server.status() == 200


def slope_of(points):
    """Of the line with the least squares."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
