"""Fields that vLLM's pooling requests share: which ones the gateway applies and which ones it refuses. Pure.

Source: vLLM 0.33, entrypoints/pooling; names of older releases where they meant the same.
Rule: a field that changes the result is applied or refused, never ignored. A field that only names or orders
a request changes nothing and is ignored.
"""

from collections.abc import Container
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from backends.contract import Chat, Classify, Embed, EmbedParts, Encode, Score, Truncate
from gateway.api.server.body import INTEGER_MAX, Integer
from gateway.api.wire.conversations import Messages, chat_with, template_checked, variables_of
from gateway.api.wire.inputs import check_instruction
from gateway.calls import Call, ScoreParts
from gateway.errors import InvalidInput

ChatWork = TypeVar("ChatWork", bound=Embed | Encode | Classify)
# 0, which is vLLM's default, is no bound.
TextTokens = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# -1 is the model's length.
CutLength = Annotated[int, msgspec.Meta(ge=-1, le=INTEGER_MAX)]
# It becomes a part of the reply's id.
RequestId = Annotated[str, msgspec.Meta(max_length=256)]


class VllmOptions(msgspec.Struct, kw_only=True):
    """Options of every pooling request.

    truncate_prompt_tokens: inputs are cut at so many, -1 at the model's length. use_activation: false returns
    raw output; softmax and activation are its older names. instruction: the task in words, for a model that
    takes one; chat_template_kwargs may contain it instead, and nothing else. request_id: becomes the reply's
    id. user and cache_salt change nothing. messages: conversations, which the model's chat template renders
    with chat_template_kwargs as its variables; only paths that read them take the fields for them.
    """

    truncate_prompt_tokens: CutLength | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None
    priority: Integer | None = 0
    padding: Literal["max_length", "do_not_pad"] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    normalize: bool | None = None
    request_id: RequestId | None = None
    user: str | None = None
    cache_salt: str | None = None
    instruction: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


# Field → values that do not change the result.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "priority": (None, 0),
    "padding": (None, "do_not_pad"),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    # Removed in favor of `use_activation`; releases before 0.20 applied it.
    "normalize": (None, True),
    "messages": (None,),
    "chat_template": (None,),
    "add_generation_prompt": (None, False),
    "continue_final_message": (None, False),
}
# Fields of `HARMLESS` that have an effect on texts, and on conversations, where a path reads them.
TEXT_FIELDS = frozenset({"add_special_tokens"})
CHAT_FIELDS = TEXT_FIELDS | {
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
}
# Read at once, because every call is checked.
_values_of = attrgetter(*HARMLESS)
_DEFAULTS = _values_of(VllmOptions())
WAY_OUT = {
    "normalize": ": send `use_activation`",
    "priority": " except as 0: send the header `x-priority: bulk`",
    **dict.fromkeys(CHAT_FIELDS, ": it needs `messages`, at /v1/embeddings, /classify or /pooling"),
    "add_special_tokens": " except as true at this path",
    "messages": " at this path: send texts; /v1/embeddings, /classify and /pooling read conversations",
}


def check_options(options: VllmOptions, *, own: Container[str] = ()) -> None:
    """Check that no option asks for a computation that the gateway does not do.

    own: fields that have a different meaning on this path and are skipped. Raises: InvalidInput.
    """
    if _values_of(options) != _DEFAULTS:
        _check_harmless(options, own)
    is_chat = options.messages is not None
    if (
        options.chat_template_kwargs
        and not is_chat
        and options.chat_template_kwargs.keys() != {"instruction"}
    ):
        raise InvalidInput(
            "`chat_template_kwargs` may contain `instruction` only, unless `messages` are sent",
            param="chat_template_kwargs",
        )
    cut = options.truncate_prompt_tokens
    if cut == 0:
        raise InvalidInput("`truncate_prompt_tokens` is -1, or at least 1", param="truncate_prompt_tokens")


def _check_harmless(options: VllmOptions, own: Container[str]) -> None:
    for field, allowed in HARMLESS.items():
        if field not in own and getattr(options, field) not in allowed:
            way_out = WAY_OUT.get(field, "")
            raise InvalidInput(f"`{field}` is not supported by this gateway{way_out}", param=field)


def instruction_of(options: VllmOptions) -> str | None:
    """Return the instruction of a request, None without one; that of `chat_template_kwargs` takes precedence.

    With `messages` it is a variable of the template there. Raises: InvalidInput.
    """
    if options.messages is not None:
        if options.instruction:
            raise InvalidInput(
                "`instruction` is for texts: write it into `messages`, or send `chat_template_kwargs`",
                param="instruction",
            )
        return None
    if not options.chat_template_kwargs:
        return check_instruction(options.instruction)
    instruction = options.chat_template_kwargs.get("instruction")
    if not isinstance(instruction, str):
        raise InvalidInput(
            "`instruction` in `chat_template_kwargs` is not a string", param="chat_template_kwargs"
        )
    return check_instruction(instruction)


def own_fields(options: VllmOptions) -> frozenset[str]:
    """Return the fields of `HARMLESS` that have an effect where a path reads texts and conversations."""
    return TEXT_FIELDS if options.messages is None else CHAT_FIELDS


def chat_of(options: VllmOptions) -> Chat | None:
    """Return how the conversations of a request are rendered, None for texts. Raises: InvalidInput."""
    if options.messages is None:
        return None
    return chat_with(
        template_checked(options.chat_template),
        variables_of(options.chat_template_kwargs),
        adds_prompt=bool(options.add_generation_prompt),
        continues=bool(options.continue_final_message),
    )


def adds_special_tokens(options: VllmOptions) -> bool:
    """Return whether the tokenizer's special tokens are added; a chat template writes its own."""
    if options.add_special_tokens is None:
        return options.messages is None
    return options.add_special_tokens


def check_no_special_tokens(options: VllmOptions) -> None:
    """Check that a message with images or sound asks for no special tokens but its template's.

    Raises: InvalidInput.
    """
    if options.add_special_tokens:
        raise InvalidInput(
            "`add_special_tokens` is for texts: leave it out of `messages` with images or sound",
            param="add_special_tokens",
        )


def with_chat(work: ChatWork, chat: Chat | None, *, special_tokens: bool) -> ChatWork:
    """Return the work of a request whose inputs may be conversations, which get no prompt."""
    if chat is None:
        return work if special_tokens else msgspec.structs.replace(work, special_tokens=False)
    prompt = {} if isinstance(work, Classify) else {"prompt_name": ""}
    return msgspec.structs.replace(work, chat=chat, special_tokens=special_tokens, **prompt)


def truncate_of(options: VllmOptions) -> bool | None:
    """Return whether to cut inputs that are too long, or None to follow the model's config."""
    return None if options.truncate_prompt_tokens is None else True


def length_of(options: VllmOptions) -> int | None:
    """Return the tokens at which inputs are cut, special ones included; None is the model's length."""
    return None if options.truncate_prompt_tokens == -1 else options.truncate_prompt_tokens


def truncation_side(options: VllmOptions) -> Truncate | None:
    """Return the end of the input to cut, or None for the model's default."""
    return None if options.truncation_side is None else Truncate(options.truncation_side)


def is_raw(options: VllmOptions) -> bool:
    """Return whether the request asks for output without the last activation. Raises: InvalidInput."""
    stated = {options.use_activation, options.softmax, options.activation} - {None}
    if len(stated) > 1:
        raise InvalidInput(
            "`use_activation`, `softmax` and `activation` mean the same: send the first of them",
            param="use_activation",
        )
    return False in stated


def call_of(
    options: VllmOptions, work: Embed | Encode | EmbedParts | Score | ScoreParts | Classify, model: str | None
) -> Call:
    """Return the call of a request at vLLM's own paths. Raises: InvalidInput."""
    return Call(
        work,
        model,
        truncate_of(options),
        truncation_side(options),
        instruction=instruction_of(options),
        prompt_tokens=length_of(options),
    )
