"""The fields that vLLM's pooling requests share: which are taken, and which are refused. Pure.

Source: vLLM 0.33, entrypoints/pooling; names of older releases where they meant the same.
Rule: a field that changes what is computed is taken or refused, never passed over; one that names or orders
a request changes nothing, and is let be.
"""

from collections.abc import Container
from typing import Any, Literal

import msgspec

from backends.contract import Truncate
from gateway.errors import InvalidInput


class VllmOptions(msgspec.Struct, kw_only=True):
    """truncate_prompt_tokens: -1 cuts at the model's length. use_activation: false asks for raw output;
    softmax and activation are its names of old.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = 0
    padding: Literal["max_length", "do_not_pad"] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    instruction: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    messages: Any = None


# Field → what may be said of it without changing anything.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "priority": (None, 0),
    "padding": (None, "do_not_pad"),
    "mm_processor_kwargs": (None, {}),
    "instruction": (None, ""),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
}


def check_options(options: VllmOptions, *, own: Container[str] = ()) -> None:
    """own: fields that mean something else on a path. Raises: InvalidInput for one that is not done here."""
    if options.messages is not None:
        raise InvalidInput(
            "`messages` is refused: no chat template is applied here; send texts", param="messages"
        )
    for field, allowed in HARMLESS.items():
        if field not in own and getattr(options, field) not in allowed:
            raise InvalidInput(f"`{field}` is not supported by this gateway", param=field)
    cut = options.truncate_prompt_tokens
    if cut is not None and cut < -1:
        raise InvalidInput("`truncate_prompt_tokens` is -1 or more", param="truncate_prompt_tokens")


def truncate_of(options: VllmOptions, max_tokens: int | None) -> bool | None:
    """Whether to cut what is too long; None is as the model's config says.

    max_tokens: the model's length, None where nobody knows it. Raises: InvalidInput where less is asked for.
    """
    cut = options.truncate_prompt_tokens
    if cut is None:
        return None
    if cut == -1 or (max_tokens is not None and cut >= max_tokens):
        return True
    known = "" if max_tokens is None else f" ({max_tokens})"
    raise InvalidInput(
        f"`truncate_prompt_tokens` cuts at the model's length{known} here: send -1",
        param="truncate_prompt_tokens",
    )


def side_of(options: VllmOptions) -> Truncate | None:
    """The end that is cut."""
    return None if options.truncation_side is None else Truncate(options.truncation_side)


def is_raw(options: VllmOptions) -> bool:
    """Whether what comes before the last activation is asked for."""
    return False in (options.use_activation, options.softmax, options.activation)
