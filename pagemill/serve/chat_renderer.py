"""`ChatRenderer`: a conversation becomes the text of a prompt. Does not know where conversations come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.errors import RequestError
from pagemill.serve.processing.conversation import parse_conversation
from pagemill.serve.processing.input_processor import InputProcessor
from pagemill.tokenizers.interface import Tokenizer

_OWN_NAMES = frozenset({"add_generation_prompt", "chat_template", "continue_final_message", "messages", "self"})
"""What a template gets from the options, or the tokenizer does."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    """End with the header of an assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open, to be continued."""
    chat_template: str | None = None
    """Jinja source; None: the model's own."""
    template_variables: Mapping[str, Any] | None = None


class ChatRenderer:
    """Applies the chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, inputs: InputProcessor) -> None:
        self._tokenizer = tokenizer
        self._inputs = inputs

    def unread_variables(self, options: ChatOptions) -> list[str]:
        """Names of `template_variables` that the template does not read, so that they change nothing. Raises
        RequestError for a malformed template."""
        if not options.template_variables:
            return []
        read = self._tokenizer.template_variables(options.chat_template)
        return [] if read is None else [name for name in options.template_variables if name not in read]

    def render(self, messages: Any, options: ChatOptions, generates: bool = True) -> str:
        """A conversation as the text of a prompt, special tokens included; `RequestOptions(rendered=True)` is how it is
        taken. `generates`: it is to be continued. Raises RequestError."""
        if generates:
            self._inputs.check_generates()
        if options.add_generation_prompt and options.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        taken = sorted(_OWN_NAMES.intersection(options.template_variables or ()))
        if taken:
            raise RequestError(f"chat_template_kwargs must not set {', '.join(taken)}", "chat_template_kwargs")
        return self._tokenizer.render_chat(
            parse_conversation(messages),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template=options.chat_template,
            **(options.template_variables or {}),
        )
