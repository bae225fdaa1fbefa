"""The embedded default model, from text to text: what the README promises."""

import subprocess
import sys

import pytest

from pagemill import LLM, SamplingParams

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM("smollm2") as llm:
        yield llm


def test_generate_continues_prompts_in_order(llm):
    outputs = llm.generate(["Hello, my name is", "2+2="], SamplingParams(temperature=0, max_tokens=16))
    assert [output.prompt for output in outputs] == ["Hello, my name is", "2+2="]
    assert all(len(output.outputs[0].token_ids) <= 16 and output.outputs[0].text for output in outputs)


def test_chat_writes_about_the_ocean(llm):
    question = [{"role": "user", "content": "Write one sentence about the ocean."}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)[0]
    text = output.outputs[0].text.lower()
    assert "ocean" in text
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_the_primary_colours(llm):
    params = SamplingParams(temperature=0, max_tokens=24)
    text = llm.generate("The three primary colours are", params, use_tqdm=False)[0].outputs[0].text
    assert "red" in text
    assert "blue" in text


def test_complete_prints_only_the_text_to_a_pipe(smollm2_path):
    command = [sys.executable, "-m", "pagemill", "complete", "--model", "smollm2"]
    command += ["The three primary colours are", "--max-tokens", "24", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout
