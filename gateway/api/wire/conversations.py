"""Messages of texts, pictures and sound, as OpenAI's chat has them, and conversations. Pure.

A conversation, which the model's chat template renders, is one input.
Source: vLLM 0.33, entrypoints/pooling/base/protocol.py and entrypoints/pooling/scoring.
"""

from typing import Annotated, Any, TypeAlias

import msgspec

from backends.contract import Chat
from gateway.errors import EmptyInput, InvalidInput

# A template goes through all messages several times.
MESSAGES_MAX = 1024
# vLLM's own templates have at most a fifth of this.
TEMPLATE_BYTES_MAX = 64 * 1024
VARIABLES_BYTES_MAX = 64 * 1024
# Arguments of the renderer itself, which are no variables.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tokenize",
        "tools",
    }
)


class MediaAddress(msgspec.Struct, omit_defaults=True):
    """Place of a picture or recording: a `data:` URI. detail: OpenAI's; the model decides it."""

    url: str
    detail: str | None = None


class InputAudio(msgspec.Struct, omit_defaults=True):
    """A recording in base64. format: OpenAI's; the content decides it."""

    data: str
    format: str | None = None


class ContentPart(msgspec.Struct, omit_defaults=True):
    """A part of a message: a text, or a picture or recording where the path takes them."""

    type: str
    text: str | None = None
    image_url: MediaAddress | str | None = None
    audio_url: MediaAddress | str | None = None
    input_audio: InputAudio | None = None


class Content(msgspec.Struct):
    """A text in the form of a message's content."""

    content: list[ContentPart]


def address_of(place: MediaAddress | str | None) -> str | None:
    """Return the address of a picture or recording, None if there is none."""
    return place.url if isinstance(place, MediaAddress) else place


def is_media(parts: list[ContentPart]) -> bool:
    """Return whether a part of a content is other than a text: a picture, a recording, or not known here."""
    return any(
        part.type != "text"
        or part.image_url is not None
        or part.audio_url is not None
        or part.input_audio is not None
        for part in parts
    )


def text_of_parts(parts: list[ContentPart], field: str) -> str:
    """Return the texts of a content as lines of one text. Raises: InvalidInput.

    Chat templates of models that read texts join the parts of a message so.
    """
    texts = [part.text for part in parts if part.type == "text" and part.text is not None]
    if not parts or len(texts) < len(parts):
        raise InvalidInput(
            f"`{field}` has content without parts, or with other parts than texts; only text is accepted",
            param=field,
        )
    return "\n".join(texts)


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a conversation. content: a text, or parts with a text each."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart]
    name: str | None = None


# One conversation, or a list of conversations.
Messages: TypeAlias = list[ChatMessage | list[ChatMessage]]


def conversations_of(messages: Messages) -> list[str]:
    """Return each conversation as a JSON list of messages. Raises: EmptyInput, InvalidInput."""
    return [_conversation(conversation) for conversation in split_conversations(messages)]


def split_conversations(messages: Messages) -> list[list[ChatMessage]]:
    """Return the messages of each conversation. Raises: EmptyInput, InvalidInput."""
    lists = [item for item in messages if isinstance(item, list)]
    single = [item for item in messages if isinstance(item, ChatMessage)]
    if lists and single:
        raise InvalidInput("`messages` mixes messages and conversations", param="messages")
    conversations = lists or [single]
    for conversation in conversations:
        if not conversation:
            raise EmptyInput("`messages` has a conversation without messages", param="messages")
        if len(conversation) > MESSAGES_MAX:
            raise InvalidInput(
                f"`messages` has a conversation of {len(conversation)} messages; at most {MESSAGES_MAX} are "
                "rendered",
                param="messages",
            )
    return conversations


def _conversation(messages: list[ChatMessage]) -> str:
    for message in messages:
        if not isinstance(message.content, str):
            _check_parts(message.content)
    return msgspec.json.encode(messages).decode()


def _check_parts(parts: list[ContentPart]) -> None:
    if not parts or any(part.type != "text" or part.text is None for part in parts):
        raise InvalidInput(
            "`messages` has content other than text, which this path does not take here: send parts "
            'as {"type": "text", "text": …}',
            param="messages",
        )


def chat_with(
    template: str | None, kwargs: dict[str, Any] | None, *, adds_prompt: bool, continues: bool
) -> Chat:
    """Return the rendering of conversations by a template with variables. Raises: InvalidInput."""
    if template is not None and len(template.encode()) > TEMPLATE_BYTES_MAX:
        raise InvalidInput(
            f"`chat_template` has more than {TEMPLATE_BYTES_MAX} bytes: shorten it", param="chat_template"
        )
    reserved = sorted(RESERVED & (kwargs or {}).keys())
    if reserved:
        raise InvalidInput(
            f"`chat_template_kwargs` must not contain `{reserved[0]}`, which is no variable of the template",
            param="chat_template_kwargs",
        )
    variables = msgspec.json.encode(kwargs or {})
    if len(variables) > VARIABLES_BYTES_MAX:
        raise InvalidInput(
            f"`chat_template_kwargs` has more than {VARIABLES_BYTES_MAX} bytes: shorten it",
            param="chat_template_kwargs",
        )
    if adds_prompt and continues:
        raise InvalidInput(
            "send `add_generation_prompt` or `continue_final_message`, one of them",
            param="continue_final_message",
        )
    return Chat(adds_prompt, continues, template, variables.decode())
