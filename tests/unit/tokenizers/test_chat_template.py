import datetime
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill.errors import RequestError
from pagemill.tokenizers import chat_template, template_budget
from pagemill.tokenizers.chat_template import render, variables_of

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}
{#- a comment #}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'assistant' or message.role == 'system' %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
MISTRAL = """{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- set ns.index = ns.index + 1 %}
        {{- "[INST] " }}{% for part in message["content"] %}{{ part["text"] }}{% endfor %}{{- "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {%- if message["content"] is string %}{{- " " + message["content"] + eos_token }}
        {%- else %}{{- " " + message["content"][0]["text"] + eos_token }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "generation": GENERATION}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": 'Hello <world> & "you" 日本\n'}
CHATS = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": " Hi there "}, {"role": "user", "content": "More?"}],
}


def reference(template, chat, **options):
    texts, _ = render_jinja_template([chat], chat_template=template, **options)
    return texts[0]


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_equals_transformers(template, chat, generation_prompt):
    source = TEMPLATES[template]
    ours = render(source, CHATS[chat], add_generation_prompt=generation_prompt, variables=SPECIAL)
    theirs = reference(source, CHATS[chat], add_generation_prompt=generation_prompt, **SPECIAL)
    assert ours == theirs
    assert 'Hello <world> & "you" 日本' in ours


def test_tools_as_json_equal_transformers():
    tools = [
        {"type": "function", "function": {"name": "f", "description": "<&> 日本", "parameters": {"b": 1, "a": []}}}
    ]
    ours = render(LLAMA3, [USER], variables={**SPECIAL, "tools": tools})
    assert ours == reference(LLAMA3, [USER], tools=tools, add_generation_prompt=True, **SPECIAL)
    assert '"description": "<&> 日本"' in ours


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma"])
def test_continued_message_equals_transformers(template):
    chat = [USER, {"role": "assistant", "content": "The answer is"}]
    source = TEMPLATES[template]
    ours = render(source, chat, add_generation_prompt=False, continue_final_message=True, variables=SPECIAL)
    theirs = reference(source, chat, add_generation_prompt=False, continue_final_message=True, **SPECIAL)
    assert ours == theirs
    assert ours.endswith("The answer is")


def test_continued_message_keeps_its_last_spaces_and_parts():
    chat = [USER, {"role": "assistant", "content": [{"type": "text", "text": "a b "}]}]
    assert render(GEMMA, chat, add_generation_prompt=False, continue_final_message=True, variables=SPECIAL).endswith(
        "a b "
    )


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([USER], {"add_generation_prompt": True}, "needs add_generation_prompt=false"),
        ([{"role": "assistant"}], {}, "ends with text"),
        ([], {}, "ends with text"),
        ([{"role": "tool", "content": "unseen"}], {}, "does not show the last message's text"),
    ],
)
def test_messages_that_cannot_be_continued(chat, options, message):
    with pytest.raises(RequestError, match=message):
        render(
            LLAMA3, chat, continue_final_message=True, variables=SPECIAL, **{"add_generation_prompt": False, **options}
        )


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


def test_parts_are_joined_for_templates_that_take_text():
    assert "<|im_start|>user\none\ntwo<|im_end|>" in render(CHATML, PARTS)


def test_parts_are_kept_for_templates_that_take_them():
    assert render(GEMMA, PARTS, variables=SPECIAL) == reference(GEMMA, PARTS, add_generation_prompt=True, **SPECIAL)
    assert "user\nonetwo<end_of_turn>" in render(GEMMA, PARTS, variables=SPECIAL)


def test_text_becomes_a_part_for_templates_that_take_parts_only():
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert render(MISTRAL, chat, variables=SPECIAL) == "<s>[INST] hi[/INST] yo</s>"
    assert render(MISTRAL, PARTS, variables=SPECIAL) == "<s>[INST] onetwo[/INST]"


def test_templates_that_need_special_tokens_or_talk_of_types_take_parts():
    source = '{{ bos_token + \'{"type": "object"}\' }}' + MISTRAL
    assert render(source, PARTS, variables=SPECIAL) == '<s>{"type": "object"}<s>[INST] onetwo[/INST]'


def test_a_template_that_prints_the_list_takes_text():
    assert render("{% for m in messages %}{{ m.content }};{% endfor %}", PARTS) == "one\ntwo;"


def test_parts_that_are_no_text_are_named():
    chat = [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(
        RequestError, match=r"messages\[1\].content\[0\] is of type 'image_url'; allowed: 'text'"
    ) as raised:
        render(CHATML, chat)
    assert raised.value.field == "messages[1].content[0]"


def test_messages_are_not_changed():
    chat = [dict(PARTS[0])]
    render(CHATML, chat)
    assert chat == PARTS


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{% for m in messages %}", "malformed: line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'x' %}", "loader"),
        ("{{ 'x' * 100000000 }}", "a value of more than"),
        ("{{ [0] * 100000000 }}", "a value of more than"),
        ("{{ 9 ** 99999999 }}", "a number of more than"),
        ("{{ 9 ** 60 ** 60 }}", "a number of more than"),
        ("{{ range(1000000) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% set x = 'y' * 1000000 %}{% for i in range(9) %}{{ x }}{% endfor %}", "its output exceeds 4194304"),
        ("x" * 300_000, "has 300000 characters; at most 98304"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "chat template"),
    ],
)
def test_templates_that_fail_become_one_request_error(source, message):
    with pytest.raises(RequestError, match=message):
        render(source, [USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_templates_are_stopped(monkeypatch, source):
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.1)
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"runs for more than 0.1 s"):
        render(source, [USER])
    assert time.monotonic() - start < 60


def test_the_clock_is_not_a_variable_of_the_template():
    source = "{% set turn = 1 %}{% set made = 1 %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render(source, [USER], variables={"turn": None, "environment": None}) == USER["content"]


def test_variables_and_time_reach_the_template():
    year = str(datetime.datetime.now().year)
    assert render("{{ thinking }} {{ strftime_now('%Y') }}", [], variables={"thinking": False}) == f"False {year}"


def test_whitespace_around_blocks_is_trimmed():
    assert render("{% if true %}\n  x\n  {% endif %}\ny", []) == "  x\ny"


def test_compiled_once():
    source = "{# only here #}{{ messages | length }}"
    before = chat_template._compile.cache_info().misses
    for _ in range(5):
        render(source, [USER])
    assert chat_template._compile.cache_info().misses == before + 1


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (CHATML, {"messages", "add_generation_prompt"}),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% set x = x | default(1) %}{{ x }}", {"x"}),
        ("{% set x = 1 %}{{ x }}{% for y in [1] %}{{ y }}{% endfor %}", set()),
        ("{% macro f(x) %}{{ x }}{{ z }}{% endmacro %}{{ f(1) }}", {"z"}),
        ("{% generation %}{{ x ~ [y, z.a] }}{% endgeneration %}", {"x", "y", "z"}),
    ],
)
def test_the_variables_that_a_template_reads(source, names):
    assert variables_of(source) == names


def test_the_variables_of_a_malformed_template():
    with pytest.raises(RequestError, match="malformed"):
        variables_of("{% if %}")
