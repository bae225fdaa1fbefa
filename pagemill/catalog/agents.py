"""Coding agents and other clients: what each needs to use a server, for `pagemill connect`.

`{url}` is the server without /v1, `{model}` the name of its model, `{key}` a reference to the variable with the key; no
text holds a key. Another client is one more entry.
"""

from typing import Final, NamedTuple


class Agent(NamedTuple):
    """A client that can use this server, and how it is configured for that."""

    title: str
    path: str
    """The endpoint that it uses; a server without it cannot serve it."""
    text: str
    """What to set, and where."""


CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
_TOOLS: Final = (
    "# it calls tools: start the server with --enable-auto-tool-choice and the --tool-call-parser of the model\n"
)
_OPENAI: Final = 'export OPENAI_BASE_URL="{url}/v1"\nexport OPENAI_API_KEY="{key}"\n'

AGENTS: Final[dict[str, Agent]] = {
    "openai": Agent("any client of OpenAI's SDKs", CHAT, _OPENAI + "# model: {model}\n"),
    "anthropic": Agent(
        "any client of Anthropic's SDKs",
        MESSAGES,
        'export ANTHROPIC_BASE_URL="{url}"\nexport ANTHROPIC_API_KEY="{key}"\n# model: {model}\n',
    ),
    "claude-code": Agent(
        "Claude Code",
        MESSAGES,
        _TOOLS + 'export ANTHROPIC_BASE_URL="{url}"\nexport ANTHROPIC_AUTH_TOKEN="{key}"\n'
        'export ANTHROPIC_MODEL="{model}"\nexport ANTHROPIC_SMALL_FAST_MODEL="{model}"\n'
        "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1\nclaude\n",
    ),
    "codex": Agent(
        "Codex CLI",
        RESPONSES,
        _TOOLS + '# ~/.codex/config.toml; the key is read from OPENAI_API_KEY\nmodel = "{model}"\n'
        'model_provider = "pagemill"\n\n[model_providers.pagemill]\nname = "pagemill"\nbase_url = "{url}/v1"\n'
        'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n',
    ),
    "opencode": Agent(
        "opencode",
        CHAT,
        _TOOLS + "# opencode.json\n"
        '{{"provider": {{"pagemill": {{"npm": "@ai-sdk/openai-compatible", "name": "pagemill",\n'
        '  "options": {{"baseURL": "{url}/v1", "apiKey": "{{env:OPENAI_API_KEY}}"}},\n'
        '  "models": {{"{model}": {{}}}}}}}}, "model": "pagemill/{model}"}}\n',
    ),
    "aider": Agent(
        "aider",
        CHAT,
        'export OPENAI_API_BASE="{url}/v1"\nexport OPENAI_API_KEY="{key}"\naider --model "openai/{model}"\n',
    ),
    "qwen-code": Agent("Qwen Code", CHAT, _TOOLS + _OPENAI + 'export OPENAI_MODEL="{model}"\nqwen\n'),
    "goose": Agent(
        "goose",
        CHAT,
        _TOOLS + 'export GOOSE_PROVIDER=openai\nexport GOOSE_MODEL="{model}"\nexport OPENAI_HOST="{url}"\n'
        'export OPENAI_API_KEY="{key}"\ngoose session\n',
    ),
    "continue": Agent(
        "Continue",
        CHAT,
        "# ~/.continue/config.yaml\nmodels:\n  - name: {model}\n    provider: openai\n    model: {model}\n"
        "    apiBase: {url}/v1\n    apiKey: ${{{{ secrets.OPENAI_API_KEY }}}}\n",
    ),
    "llm": Agent(
        "the llm tool",
        CHAT,
        '# extra-openai-models.yaml in the folder that `dirname "$(llm logs path)"` prints\n'
        '- model_id: pagemill\n  model_name: {model}\n  api_base: "{url}/v1"\n  api_key_name: pagemill\n',
    ),
    "curl": Agent(
        "curl",
        CHAT,
        'curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\\n'
        """  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'\n""",
    ),
}
"""Name for `pagemill connect` -> what it needs."""
