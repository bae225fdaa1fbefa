"""Seams that no example package of tests/plugins has a line for: a toy implementation, added by one line, is used."""

import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from pagemill.artifacts.describe import describe
from pagemill.catalog.executors import EXECUTORS
from pagemill.catalog.grammars import GRAMMARS
from pagemill.catalog.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagemill.catalog.weights import WEIGHTS, check_load_format, weights_source
from pagemill.config.arguments import EngineArgs, add_flags, make_section
from pagemill.config.decisions import Decisions
from pagemill.config.fields import setting
from pagemill.config.rules.parallel import resolve_parallel
from pagemill.engine.executor.factory import make_executor
from pagemill.engine.structured_output.compiling import GrammarQueue
from pagemill.errors import ConfigError, RequestError
from pagemill.grammar.checker import problem
from pagemill.grammar.translate import translated
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.structured_outputs import GrammarSpec, StructuredOutputsParams
from pagemill.model.factory import load_model
from pagemill.model.loading.sources import safetensors
from pagemill.platforms.cpu import CpuPlatform
from pagemill.serve.parsers.choose import MessageParsers, ParserSettings
from pagemill.serve.parsers.format import Calls, JsonCall, Reasoning
from pagemill.serve.parsers.interface import MessageForm
from pagemill.utils.timing import PhaseTimer
from tests.fakes.byte_vocabulary import TABLE, ByteTokens
from tests.fakes.configs import model_config
from tests.fakes.engine_setup import engine_config
from tests.fakes.messages import Call, Message, parse
from tests.fakes.tiny_checkpoint import make_checkpoint


class ToyExecutor:
    """Keeps what it was built with."""

    def __init__(self, spec):
        self.spec = spec

    @classmethod
    def build(cls, spec):
        return cls(spec)


def test_an_executor_is_a_class_and_a_line():
    config = engine_config()
    asked = EngineArgs(distributed_executor_backend="toy").settings.parallel
    with pytest.raises(ConfigError, match="unknown executor 'toy'; known: mp, ray, uni"):
        resolve_parallel(asked, config.facts, Decisions())
    EXECUTORS.add("toy", f"{__name__}:ToyExecutor")
    try:
        parallel = resolve_parallel(asked, config.facts, Decisions())
        made = make_executor(dataclasses.replace(config, parallel=parallel), "a.module:Worker")
    finally:
        EXECUTORS.remove("toy")
    assert isinstance(made, ToyExecutor)
    assert made.spec.worker == "a.module:Worker"


class ToyGrammars:
    """Follows nothing but choices, and those without a library."""

    check_s = 1.0

    def __init__(self, table, tokenizer=None):
        self.table = table

    @staticmethod
    def check_installed():
        """It is."""

    @staticmethod
    def source(form):
        if form.kind != "choice":
            raise ValueError(f"{form.kind} is too much to ask")
        return " or ".join(form.content)

    def matcher(self, source):
        raise ValueError(f"{source}: nobody knows")


def test_a_grammar_backend_is_a_class_and_a_line():
    """It writes sources in the front end, and makes matchers of them in the checker's process and the engine."""
    GRAMMARS.add("toy", f"{__name__}:ToyGrammars")
    queue = GrammarQueue(ByteTokens, len(TABLE.tokens), (), "toy")
    try:
        source = translated(StructuredOutputsParams(choice=["a", "b"]), "toy")
        with pytest.raises(RequestError, match="regex='a' is not supported: regex is too much to ask"):
            translated(StructuredOutputsParams(regex="a"), "toy")
        assert problem(GRAMMARS.resolve("toy")(TABLE), TABLE, source) == "a or b: nobody knows"
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=[1], params=SamplingParams(), arrival_time=0, grammar=GrammarSpec(source)
        )
        queue.add(request)
        while len(queue):
            queue.take_ready(idle=True)
        with pytest.raises(ValueError, match="a or b: nobody knows"):
            queue.grammar_of(request)
    finally:
        queue.shutdown()
        GRAMMARS.remove("toy")
    assert source == "a or b"


TOY_REASONING = Reasoning("<t>", "</t>", models="Toy")
TOY_CALLS = Calls(models="Toy", form=(JsonCall(),), begin=("<call>",), end=("</call>",))
TOY_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_a_format_of_messages_is_a_constant_and_a_line():
    text = '<t>So.</t>I look.<call>{"name": "look", "arguments": {"a": 1}}</call>'
    REASONING_PARSERS.add("toy", f"{__name__}:TOY_REASONING")
    TOOL_PARSERS.add("toy", f"{__name__}:TOY_CALLS")
    try:
        parsers = MessageParsers(ParserSettings("toy", "toy"))
        for pieces in ([text], list(text)):
            parser = parsers.make(MessageForm(tools=TOY_TOOLS))
            assert parser is not None
            assert parse(parser, pieces) == Message("I look.", "So.", [Call("look", '{"a": 1}', True)])
    finally:
        REASONING_PARSERS.remove("toy")
        TOOL_PARSERS.remove("toy")


READ = []


def toy_tensors(facts, dtype, seed, select, place):
    """The tensors of a format that looks much like another one."""
    for name, tensor in safetensors.iterate(facts, dtype, seed, select, place):
        READ.append(name)
        yield name, tensor


def test_a_weight_format_is_a_function_and_a_line(tmp_path):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    facts = dataclasses.replace(describe("m", folder), weights_format="toy")
    WEIGHTS.add("toy", f"{__name__}:toy_tensors")
    try:
        model = load_model(facts, model_config(str(folder)), CpuPlatform(), PhaseTimer())
    finally:
        WEIGHTS.remove("toy")
    assert model.cache_layers()
    assert "model.embed_tokens.weight" in READ


def test_a_weight_format_may_be_named_by_its_path(tmp_path):
    name = f"{__name__}:toy_tensors"
    check_load_format(name)
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    facts = describe("m", folder, load_format=name)
    READ.clear()
    load_model(facts, model_config(str(folder), load_format=name), CpuPlatform(), PhaseTimer())
    assert "model.embed_tokens.weight" in READ
    config = model_config(str(folder), model_loader_extra_config={"threads": 2})
    with pytest.raises(ConfigError, match="'threads', no option of safetensors; it has none"):
        load_model(describe("m", folder), config, CpuPlatform(), PhaseTimer())


@pytest.mark.parametrize(
    ("name", "message"),
    [("pt", "pickles are never loaded"), ("tensorizer", "use auto, or a plug-in"), ("x", "none of auto, dummy, gguf")],
)
def test_a_weight_format_that_nobody_knows(name, message):
    with pytest.raises(ConfigError, match=message):
        check_load_format(name)


@pytest.mark.parametrize("name", ["json:loads", "os:system", f"{__name__}:ToySettings"])
def test_a_weight_format_that_is_no_such_function(name):
    with pytest.raises(ConfigError, match=f"load_format='{name}' is no function of facts, dtype, seed, select, place"):
        weights_source(name)
    assert weights_source(f"{__name__}:toy_tensors") is toy_tensors


@dataclass(frozen=True)
class ToySettings:
    """A section."""

    tau: float | None = setting(None, "a number (default: the model's)", low=0)


def test_a_setting_is_a_field():
    parser = argparse.ArgumentParser()
    add_flags(parser, [ToySettings])
    assert make_section(ToySettings, vars(parser.parse_args(["--tau", "0.5"]))).tau == 0.5
    assert "a number (default: the model's)" in parser.format_help()
    with pytest.raises(ConfigError, match=r"tau=-1.0 is too small: at least 0"):
        make_section(ToySettings, {"tau": -1.0})
