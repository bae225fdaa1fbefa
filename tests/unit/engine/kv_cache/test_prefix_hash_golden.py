"""Hashes are the same in every process and version: a golden file pins those of the canonical encoding.

Run as a program, this file prints what its process computes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import envs
from pagemill.engine.kv_cache.prefix_hash import PrefixHasher
from pagemill.engine.request import Request
from pagemill.messages.engine_io import LoRARequest, MultimodalItem
from tests.fakes.engine_setup import core_request

ROOT = Path(__file__).resolve().parents[4]
GOLDEN = Path(__file__).with_name("golden_prefix_hashes.json")
"""[{algorithm, seed, block_size, prompt, salt?, lora?, items?, hashes}]. Nothing writes this file: whoever has
to change it parts the caches of old engines from those of new ones."""
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
PROMPT = [1, 7493, 1681, 32_000, 9551, 0, 2**31 - 1, 5, 24, 262_143, 23, 4]
REQUESTS = (
    {},
    {"salt": "tenant"},
    {"lora": ["adapter", 3, "/adapters/3"]},
    {"items": [[3, 6, "cat"]]},
    {"salt": "tenant", "lora": ["adapter", 3, "/adapters/3"], "items": [[0, 2, "cat"], [5, 4, "dog"]]},
)
GOLDEN_CASES = [
    {"algorithm": algorithm, "seed": "17", "block_size": block_size, "prompt": PROMPT} | request
    for algorithm in ("sha256_cbor", "xxhash_cbor")
    for block_size in (4, 6)
    for request in REQUESTS
]


def hashes(case):
    """The hashes of a case's full blocks, as hexadecimal text."""
    request = core_request(
        "r",
        case["prompt"],
        salt=case.get("salt"),
        lora=LoRARequest(*case["lora"]) if "lora" in case else None,
        mm_items=[MultimodalItem(*item) for item in case.get("items", ())],
    )
    blocks = Request(request, sequence=0, max_model_len=1000)
    PrefixHasher(case["algorithm"], case["block_size"], case["seed"]).extend(blocks)
    return [digest.hex() for digest in blocks.block_hashes]


def here():
    """What this process computes: with its own seed, if the environment gives one, and for the golden cases."""
    seed = envs.prefix_hash_seed() or "17"
    cases = [
        {"algorithm": algorithm, "seed": seed, "block_size": 4, "prompt": PROMPT} | request
        for algorithm in ALGORITHMS
        for request in REQUESTS
    ]
    return [case | {"hashes": hashes(case)} for case in [*cases, *GOLDEN_CASES]]


def elsewhere(hash_seed):
    """What another process computes, whose PYTHONHASHSEED is the given one."""
    return json.loads(
        subprocess.run(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@pytest.mark.parametrize("index", range(len(GOLDEN_CASES)))
def test_the_canonical_encoding_has_the_hashes_of_the_golden_file(index):
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) == len(GOLDEN_CASES)
    case = dict(golden[index])
    expected = case.pop("hashes")
    assert case == GOLDEN_CASES[index]
    assert hashes(case) == expected


@pytest.mark.slow
def test_two_processes_with_one_seed_have_the_same_hashes_and_with_another_seed_others():
    first, second, other = elsewhere("5"), elsewhere("5"), elsewhere("6")
    assert len(first) == len(ALGORITHMS) * len(REQUESTS) + len(GOLDEN_CASES)
    assert first == second
    num_golden = len(GOLDEN_CASES)
    assert first[-num_golden:] == other[-num_golden:] == here()[-num_golden:], "those name their seed themselves"
    of_first = {digest for case in first[:-num_golden] for digest in case["hashes"]}
    of_other = {digest for case in other[:-num_golden] for digest in case["hashes"]}
    assert not of_first & of_other


if __name__ == "__main__":
    print(json.dumps(here()))
