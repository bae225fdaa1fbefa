"""Coding agents and other clients: what each needs to use a server, for `pagemill connect`.

`{url}` is the server without /v1, `{model}` the name of its model, `{context}` its context length in tokens, `{output}`
what an answer may take of that, and `{key}` a reference to the variable with the key; no text holds a key. Another
client is one more entry.
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
        # Each size of model has a variable of its own; what is asked in the background goes to the smallest.
        'export ANTHROPIC_MODEL="{model}"\nexport ANTHROPIC_DEFAULT_OPUS_MODEL="{model}"\n'
        'export ANTHROPIC_DEFAULT_SONNET_MODEL="{model}"\nexport ANTHROPIC_DEFAULT_HAIKU_MODEL="{model}"\n'
        "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1\nclaude\n",
    ),
    "codex": Agent(
        "Codex CLI",
        RESPONSES,
        _TOOLS + '# ~/.codex/config.toml\nmodel = "{model}"\nmodel_provider = "pagemill"\n'
        'model_context_window = {context}\n\n[model_providers.pagemill]\nname = "pagemill"\n'
        'base_url = "{url}/v1"\nwire_api = "responses"\n'
        '# the variable that it reads the key from, if the server asks for one:\n# env_key = "PAGEMILL_API_KEY"\n',
    ),
    "opencode": Agent(
        "opencode",
        CHAT,
        _TOOLS + "# opencode.json in the project, or ~/.config/opencode/opencode.json\n"
        '{{"$schema": "https://opencode.ai/config.json",\n'
        ' "provider": {{"pagemill": {{"npm": "@ai-sdk/openai-compatible", "name": "pagemill",\n'
        '  "options": {{"baseURL": "{url}/v1", "apiKey": "{{env:PAGEMILL_API_KEY}}"}},\n'
        '  "models": {{"{model}": {{"name": "{model}",\n'
        '    "limit": {{"context": {context}, "output": {output}}}}}}}}}}},\n'
        ' "model": "pagemill/{model}"}}\n',
    ),
    "zed": Agent(
        "Zed",
        CHAT,
        _TOOLS + "# settings.json; the key is read from PAGEMILL_API_KEY, which must not be empty\n"
        '{{"language_models": {{"openai_compatible": {{"pagemill": {{"api_url": "{url}/v1",\n'
        '  "available_models": [{{"name": "{model}", "display_name": "{model}", "max_tokens": {context},\n'
        '    "capabilities": {{"tools": true, "images": false, "parallel_tool_calls": true, '
        '"prompt_cache_key": false}}}}]}}}}}}}}\n',
    ),
    "droid": Agent(
        "Factory's droid",
        CHAT,
        _TOOLS + "# ~/.factory/settings.json\n"
        '{{"customModels": [{{"model": "{model}", "displayName": "{model}", "baseUrl": "{url}/v1",\n'
        '  "apiKey": "${{PAGEMILL_API_KEY}}", "provider": "generic-chat-completion-api",\n'
        '  "maxOutputTokens": {output}}}]}}\n',
    ),
    "copilot-cli": Agent(
        "GitHub Copilot CLI",
        CHAT,
        _TOOLS + 'export COPILOT_PROVIDER_TYPE=openai\nexport COPILOT_PROVIDER_BASE_URL="{url}/v1"\n'
        'export COPILOT_PROVIDER_API_KEY="{key}"\nexport COPILOT_MODEL="{model}"\ncopilot\n',
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
        'export OPENAI_BASE_PATH=v1/chat/completions\nexport OPENAI_API_KEY="{key}"\ngoose session\n',
    ),
    "continue": Agent(
        "Continue",
        CHAT,
        "# ~/.continue/config.yaml\nname: pagemill\nversion: 1.0.0\nschema: v1\n"
        "models:\n  - name: {model}\n    provider: openai\n    model: {model}\n"
        "    apiBase: {url}/v1\n    apiKey: ${{{{ secrets.PAGEMILL_API_KEY }}}}\n"
        "    roles: [chat, edit, apply]\n    defaultCompletionOptions:\n      contextLength: {context}\n",
    ),
    "llm": Agent(
        "the llm tool",
        CHAT,
        '# extra-openai-models.yaml in the folder that `dirname "$(llm logs path)"` prints\n'
        '- model_id: pagemill\n  model_name: {model}\n  api_base: "{url}/v1"\n  api_key_name: pagemill\n'
        "  supports_tools: true\n  supports_schema: true\n",
    ),
    "curl": Agent(
        "curl",
        CHAT,
        'curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\\n'
        """  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'\n""",
    ),
}
"""Name for `pagemill connect` -> what it needs."""
