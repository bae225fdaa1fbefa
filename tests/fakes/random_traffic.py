"""Random schedulers and random traffic for them, from a seed: the same seed, the same run."""

import random
from collections import Counter

import msgspec

from pagemill.config.choices import SchedulingPolicy
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.messages.engine_io import EngineCoreRequest, LoRARequest, MultimodalItem
from pagemill.messages.kv_spec import KVCacheSpec, MambaSpec
from tests.fakes.engine_setup import chunked, core_request, full, mamba, sliding
from tests.fakes.narrow import sampling_of
from tests.fakes.scheduler_driver import VOCAB_SIZE, SchedulerDriver, Setup
from tests.fakes.scripted_grammar import Rule, after_start, after_threes

MAX_MODEL_LEN = 40
SPECS = (
    (full(),),
    (sliding(5),),
    (full(), sliding(7)),
    (full(), sliding(9), sliding(2)),
    (full(8), sliding(6, 4)),
    (chunked(8),),
    (full(), chunked(6), sliding(5)),
    (full(), mamba()),
    (mamba(),),
    (full(), sliding(9), chunked(12), mamba()),
    (full(), mamba(block_size=8)),
)
"""KV groups of the models that are tried. A new kind of group is a line here, and a case in prefix_store.py."""
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", None)
PREFIXES = (
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3],
    [3, 1, 4, 1, 5, 9, 2, 7] * 3,
)
"""What prompts begin with; the two have seven tokens in common."""
ADAPTERS = (LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/a"))
MAX_WAITING = 8
"""Arrivals pause meanwhile, so that most steps have something to decide."""
STEPS_PER_EPISODE = 60


def setup_from(
    specs: tuple[KVCacheSpec, ...],
    spare_blocks: int,
    depth: int,
    algorithm: str | None,
    partial_reuse: bool,
    budget: int,
    slots: int,
    chunked: bool,
    threshold: int,
    policy: str,
    prefill: int,
    max_drafts: int = 0,
    rule: Rule | None = None,
) -> Setup:
    """A setup; without chunks, the budget is as large as it must be. States are not reused in part, nor taken back as
    drafts are, for which a step has room in any case."""
    states = any(isinstance(spec, MambaSpec) for spec in specs)
    max_drafts = 0 if states else max_drafts
    budget = max(budget, depth * (1 + max_drafts))
    limits = SchedulerLimits(
        max_num_batched_tokens=budget if chunked else max(budget, MAX_MODEL_LEN),
        max_num_seqs=slots,
        max_model_len=MAX_MODEL_LEN,
        max_prefill_tokens=prefill,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        policy=SchedulingPolicy(policy),
    )
    return Setup(specs, limits, spare_blocks, depth, algorithm, partial_reuse and not states, max_drafts, rule)


def random_setup(rng: random.Random, number: int) -> Setup:
    """The kinds of groups, the algorithms and the depths take turns, so that a short run has seen them all."""
    return setup_from(
        specs=SPECS[number % len(SPECS)],
        spare_blocks=rng.choice([0, 0, 1, 2, 4, 8]),
        depth=(1, 2, 1, 3)[number % 4],
        algorithm=ALGORITHMS[number % 7 % len(ALGORITHMS)],
        partial_reuse=number % 5 > 0,
        budget=rng.choice([2, 5, 8, 16, 64]),
        slots=rng.choice([1, 2, 3, 4, 5, 6, 6, 6]),
        chunked=rng.random() < 0.75,
        threshold=rng.choice([0, 0, 3, 6]),
        policy=rng.choice(["fcfs", "priority"]),
        prefill=rng.choice([0, 0, 6, 20]),
        max_drafts=(0, 2, 4)[number % 3],
        rule=rng.choice([None, None, after_threes, after_start]),
    )


def random_request(rng: random.Random, name: str) -> EngineCoreRequest:
    """A request that may share a prefix with others, or a whole prompt, with the same salt, adapter and images or
    with other ones."""
    prompt = rng.choice(PREFIXES)[: rng.choice([0, 4, 6, 8, 9, 12, 15, 16, 23, 24, 26])]
    prompt = prompt + rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 1, 1, 2, 5])) or [0]
    max_tokens = rng.choice([rng.randint(1, 6), rng.randint(1, 26), 40])
    stop_ids = rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 2]))
    return core_request(
        name,
        prompt,
        emitted=rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 0, 0, 1, 3])),
        priority=rng.randint(0, 2),
        arrival=rng.choice([0.0, 1.0, 2.0]),
        salt=rng.choice([None, None, None, "a", "b"]),
        lora=rng.choice([None, None, None, *ADAPTERS]),
        mm_items=random_items(rng, len(prompt)),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, rng.choice([0, 0, 2, 5])),
        stop_token_ids=stop_ids + rng.choice([[], [], list(range(20, 30))]),
        seed=rng.randint(0, 2),
        rank=rng.choice([0, 0, 0, 1, 2]),
    )


def next_turn(rng: random.Random, driver: SchedulerDriver, name: str) -> EngineCoreRequest | None:
    """What follows on a request that has ended: all that was said, or all but the end of it, and a few tokens. None
    where nothing fits, and every other time."""
    ended = [life for life in driver.lives.values() if life.finish is not None]
    if not ended or rng.random() < 0.5:
        return None
    before = rng.choice(ended[-4:])
    request = before.core_request
    said = [*request.prompt_token_ids, *request.emitted_token_ids, *before.tokens]
    prompt = said[: len(said) - rng.choice([0, 0, 0, 1, 3])] + rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 1, 2]))
    if len(prompt) >= MAX_MODEL_LEN:
        return None
    items = [item for item in request.mm_items if item.offset + item.num_tokens <= len(prompt)]
    return msgspec.structs.replace(
        request, request_id=name, prompt_token_ids=prompt, emitted_token_ids=[], mm_items=tuple(items)
    )


def random_items(rng: random.Random, length: int) -> list[MultimodalItem]:
    """None, mostly; or one of two images at one of two places in a prompt of that length."""
    offset, name = rng.choice([2, 8]), rng.choice(["cat", "dog"])
    return [MultimodalItem(offset, 6, name)] if rng.random() < 0.2 and offset + 6 <= length else []


def random_episode(rng: random.Random, driver: SchedulerDriver, num_steps: int) -> None:
    """Traffic for that many steps, and until all has ended."""
    count, pressure = 0, rng.choice([0.1, 0.3, 0.6])
    while driver.num_steps < num_steps:
        action = rng.random()
        if action < pressure and len(driver.waiting) < MAX_WAITING:
            request = next_turn(rng, driver, f"r{count}") or random_request(rng, f"r{count}")
            for sibling in range(rng.choice([1, 1, 1, 3])):
                count += 1
                driver.arrive(_sibling(request, f"r{count}", sibling))
        elif pressure < action < pressure + 0.06 and driver.lives:
            abort_one(rng, driver)
        elif pressure < action < pressure + 0.07:
            driver.reset()
        elif rng.random() < 0.1:
            driver.drain() if rng.random() < 0.3 else deliver_one(driver)
        else:
            driver.step()
            if not driver.scheduler.has_work():
                count += 1
                driver.arrive(next_turn(rng, driver, f"r{count}") or random_request(rng, f"r{count}"))
    driver.drain()


def abort_one(rng: random.Random, driver: SchedulerDriver) -> None:
    """Abort a request: rare states as often as common ones."""
    by_state: dict[str, list[str]] = {}
    for name in driver.lives:
        by_state.setdefault(driver.state(name), []).append(name)
    state = "preempted" if "preempted" in by_state else rng.choice(sorted(by_state))
    driver.abort(rng.choice(by_state[state]))


def deliver_one(driver: SchedulerDriver) -> None:
    """Let the oldest step's tokens arrive before the pipeline is full."""
    if driver.in_flight:
        driver.deliver()


def random_run(seed: int, num_steps: int) -> Counter[str]:
    """Episodes until `num_steps` steps are done: what was seen. A failure names the episode that can be run alone."""
    seen: Counter[str] = Counter()
    number = 0
    while seen["steps"] < num_steps:
        seen += run_episode(seed, number, min(STEPS_PER_EPISODE, num_steps))
        number += 1
    return seen


def run_episode(seed: int, number: int, num_steps: int = STEPS_PER_EPISODE) -> Counter[str]:
    """One setup and its traffic: what was seen."""
    rng = random.Random(f"{seed}/{number}")
    setup = random_setup(rng, number)
    driver = SchedulerDriver(setup)
    try:
        random_episode(rng, driver, num_steps)
    except Exception as error:
        error.add_note(f"run again with run_episode({seed}, {number}, {num_steps}); {setup}")
        raise
    store = driver.store
    drafts = {"drafts accepted": store.num_accepted, "drafts rejected": store.num_rejected}
    return driver.seen + Counter({"steps": driver.num_steps, **drafts})


def _sibling(request: EngineCoreRequest, name: str, index: int) -> EngineCoreRequest:
    """Another completion of the same prompt."""
    params = sampling_of(request)
    return msgspec.structs.replace(request, request_id=name, params=params.replace(seed=(params.seed or 0) + index))
