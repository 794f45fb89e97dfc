"""Rendering of conversations with a checkpoint's chat template, in transformers' sandbox.

The template is the checkpoint's, which the operator chose; messages and variables are the caller's. The
template of a request would be a program of the caller, and is refused.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from backends.contract import Chat, WorkInput
from backends.contract.errors import InvalidWork, UnsupportedWork, input_too_long
from backends.contract.texts import CHARACTERS_PER_TOKEN
from backends.recipe.recipe import ChatTemplate

Message = dict[str, Any]
# A mark that no template contains.
MARK = "\u2983content\u2984"
conversation_decoder = msgspec.json.Decoder(list[Message])


class ChatRenderer:
    """Renderer of conversations for one model.

    template: of its checkpoint, None without one. max_tokens: of the model; a conversation that has more
    characters than so many tokens can have, with its variables for each message, is refused before it is
    rendered.
    """

    def __init__(self, template: ChatTemplate | None, max_tokens: int) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._most = max_tokens * CHARACTERS_PER_TOKEN

    def render(self, conversations: Sequence[WorkInput], chat: Chat) -> list[str]:
        """Return the text of each conversation, a JSON list of messages.

        Raises: InvalidWork, UnsupportedWork.
        """
        return [self._render(str(conversation), chat) for conversation in conversations]

    def _render(self, conversation: str, chat: Chat) -> str:
        if self._template is None:
            raise UnsupportedWork("this model has no chat template for `messages`: send `input`")
        if chat.template is not None:
            raise UnsupportedWork(
                "`chat_template` of a request is not run by the built-in engine, which uses the checkpoint's "
                "own: leave it out"
            )
        if len(conversation) > self._most:
            raise input_too_long(self._max_tokens, f"{len(conversation)} characters")
        messages = conversation_decoder.decode(conversation)
        if len(conversation) + len(messages) * len(chat.variables) > self._most:
            raise InvalidWork(
                f"a template may repeat the {len(chat.variables)} characters of `chat_template_kwargs` for "
                f"each of {len(messages)} messages: the model's length allows {self._most} characters"
            )
        return self._text([self._shaped(message) for message in messages], chat)

    def _text(self, messages: list[Message], chat: Chat) -> str:
        assert self._template is not None
        # Only a model with a template for conversations needs transformers and Jinja.
        from transformers.utils.chat_template_utils import render_jinja_template

        from backends.torch.inputs.bounded_rendering import FAULTS, bounded

        variables = {**self._template.special_tokens, **msgspec.json.decode(chat.variables)}
        try:
            with bounded(self._most):
                texts, _ = render_jinja_template(
                    [messages],
                    chat_template=self._template.source,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    **variables,
                )
        except FAULTS as error:
            # The template's own words may quote the messages, which no error may contain.
            raise InvalidWork(
                "the chat template of the model refuses this conversation: check the roles of `messages`, "
                "their order, and `chat_template_kwargs`"
            ) from error
        text: str = texts[0]
        return text

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template reads a content as a list of parts, and not as one text."""
        part = {"type": "text", "text": MARK}
        try:
            text = self._text([{"role": "user", "content": [part]}], Chat())
        except InvalidWork:
            return False
        # A template that reads texts writes the list itself, with its braces.
        return MARK in text and "'type'" not in text and '"type"' not in text

    def _shaped(self, message: Message) -> Message:
        """Return a message whose content is of the type that the template reads."""
        content = message["content"]
        if self._reads_parts:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            return message | {"content": parts}
        # As vLLM joins them.
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        return message | {"content": text}
