"""Fields that vLLM's pooling requests share: which ones the gateway applies and which ones it refuses. Pure.

Source: vLLM 0.33, entrypoints/pooling; names of older releases where they meant the same.
Rule: a field that changes the result is applied or refused, never ignored. A field that only names or orders
a request changes nothing and is ignored.
"""

from collections.abc import Container
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec

from backends.contract import Classify, Embed, Encode, Score, Truncate
from gateway.api.server.body import Integer
from gateway.api.wire.instructions import check_instruction
from gateway.calls import Call
from gateway.errors import InvalidInput

# It becomes a part of the reply's id.
RequestId = Annotated[str, msgspec.Meta(max_length=256)]


class VllmOptions(msgspec.Struct, kw_only=True):
    """Options of every pooling request.

    truncate_prompt_tokens: inputs are cut at so many, -1 at the model's length. use_activation: false returns
    raw output; softmax and activation are its older names. instruction: the task in words, for a model that
    takes one; chat_template_kwargs may contain it instead, and nothing else. request_id: becomes the reply's
    id. user and cache_salt change nothing.
    """

    truncate_prompt_tokens: Integer | None = None
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
    messages: Any = None


# Field → values that do not change the result.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "priority": (None, 0),
    "padding": (None, "do_not_pad"),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    # Removed in favor of `use_activation`; releases before 0.20 applied it.
    "normalize": (None, True),
    "chat_template": (None,),
}
# Read at once, because every call is checked.
_values_of = attrgetter(*HARMLESS)
_DEFAULTS = _values_of(VllmOptions())
WAY_OUT = {
    "normalize": ": send `use_activation`",
    "priority": " except as 0: send the header `x-priority: bulk`",
}


def check_options(options: VllmOptions, *, own: Container[str] = ()) -> None:
    """Check that no option asks for a computation that the gateway does not do.

    own: fields that have a different meaning on this path and are skipped. Raises: InvalidInput.
    """
    if options.messages is not None:
        raise InvalidInput(
            "`messages` is refused: no chat template is applied here; send texts", param="messages"
        )
    if _values_of(options) != _DEFAULTS:
        _check_harmless(options, own)
    if options.chat_template_kwargs and options.chat_template_kwargs.keys() != {"instruction"}:
        raise InvalidInput(
            "`chat_template_kwargs` may contain `instruction` only", param="chat_template_kwargs"
        )
    cut = options.truncate_prompt_tokens
    if cut is not None and (cut < -1 or cut == 0):
        raise InvalidInput("`truncate_prompt_tokens` is -1, or at least 1", param="truncate_prompt_tokens")


def _check_harmless(options: VllmOptions, own: Container[str]) -> None:
    for field, allowed in HARMLESS.items():
        if field not in own and getattr(options, field) not in allowed:
            way_out = WAY_OUT.get(field, "")
            raise InvalidInput(f"`{field}` is not supported by this gateway{way_out}", param=field)


def instruction_of(options: VllmOptions) -> str | None:
    """Return the instruction of a request, None without one; that of `chat_template_kwargs` takes precedence.

    Raises: InvalidInput.
    """
    if not options.chat_template_kwargs:
        return check_instruction(options.instruction)
    instruction = options.chat_template_kwargs.get("instruction")
    if not isinstance(instruction, str):
        raise InvalidInput(
            "`instruction` in `chat_template_kwargs` is not a string", param="chat_template_kwargs"
        )
    return check_instruction(instruction)


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
    """Return whether the request asks for output without the last activation."""
    return False in (options.use_activation, options.softmax, options.activation)


def call_of(options: VllmOptions, work: Embed | Encode | Score | Classify, model: str | None) -> Call:
    """Return the call of a request at vLLM's own paths. Raises: InvalidInput."""
    return Call(
        work,
        model,
        truncate_of(options),
        truncation_side(options),
        instruction=instruction_of(options),
        prompt_tokens=length_of(options),
    )
