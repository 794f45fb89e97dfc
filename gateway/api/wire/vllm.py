"""Options that vLLM's pooling requests share, applied or refused, and the frame and bytes of their replies.

Source: vLLM 0.33, entrypoints/pooling and utils/serial_utils; older names where they meant the same.
Rule: a field that changes the result is applied or refused, never ignored. A field that only names or orders
a request changes nothing and is ignored.
"""

import asyncio
import json
import time
from collections.abc import Container, Iterable
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from backends.contract import Chat, Classify, Embed, Encode, Truncate, Vectors
from gateway.api.server.body import INTEGER_MAX, Integer
from gateway.api.server.encoding import PAUSE_BYTES, LazyList, NumberFormat
from gateway.api.server.request import Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import OCTETS, HttpReply
from gateway.api.wire.conversations import Messages, chat_with
from gateway.api.wire.inputs import check_instruction
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.serve import Served

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

    def check(self, *, own: Container[str] = ()) -> None:
        """Check that no option asks for a computation that the gateway does not do.

        own: fields that have a different meaning on this path and are skipped. Raises: InvalidInput.
        """
        if _values_of(self) != _DEFAULTS:
            for field, allowed in HARMLESS.items():
                if field not in own and getattr(self, field) not in allowed:
                    way_out = WAY_OUT.get(field, "")
                    raise InvalidInput(f"`{field}` is not supported by this gateway{way_out}", param=field)
        variables = self.chat_template_kwargs
        if variables and self.messages is None and variables.keys() != {"instruction"}:
            raise InvalidInput(
                "`chat_template_kwargs` may contain `instruction` only, unless `messages` are sent",
                param="chat_template_kwargs",
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidInput(
                "`truncate_prompt_tokens` is -1, or at least 1", param="truncate_prompt_tokens"
            )

    def check_of_texts(self) -> None:
        """Check the options where a path reads texts and conversations. Raises: InvalidInput."""
        self.check(own=TEXT_FIELDS if self.messages is None else CHAT_FIELDS)

    def checked_instruction(self) -> str | None:
        """Return the instruction, None without one; that of `chat_template_kwargs` takes precedence.

        With `messages` it is a variable of the template there. Raises: InvalidInput.
        """
        if self.messages is not None:
            if self.instruction:
                raise InvalidInput(
                    "`instruction` is for texts: write it into `messages`, or send `chat_template_kwargs`",
                    param="instruction",
                )
            return None
        if not self.chat_template_kwargs:
            return check_instruction(self.instruction)
        instruction = self.chat_template_kwargs.get("instruction")
        if not isinstance(instruction, str):
            raise InvalidInput(
                "`instruction` in `chat_template_kwargs` is not a string", param="chat_template_kwargs"
            )
        return check_instruction(instruction)

    def chat(self) -> Chat | None:
        """Return how the conversations are rendered, None for texts. Raises: InvalidInput."""
        if self.messages is None:
            return None
        return chat_with(
            self.chat_template,
            self.chat_template_kwargs,
            adds_prompt=bool(self.add_generation_prompt),
            continues=bool(self.continue_final_message),
        )

    def with_chat(self, work: ChatWork) -> ChatWork:
        """Return the work of a request whose inputs may be conversations, which get no prompt.

        A chat template writes its own special tokens. Raises: InvalidInput.
        """
        chat, adds = self.chat(), self.add_special_tokens
        if chat is None:
            return msgspec.structs.replace(work, special_tokens=False) if adds is False else work
        prompt = {} if isinstance(work, Classify) else {"prompt_name": ""}
        return msgspec.structs.replace(work, chat=chat, special_tokens=bool(adds), **prompt)

    @property
    def cuts(self) -> bool | None:
        """True if inputs that are too long are cut, None to follow the model's config."""
        return None if self.truncate_prompt_tokens is None else True

    @property
    def length(self) -> int | None:
        """Tokens at which inputs are cut, special ones included; None is the model's length."""
        return None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    @property
    def side(self) -> Truncate | None:
        """The end of the input to cut, or None for the model's default."""
        return None if self.truncation_side is None else Truncate(self.truncation_side)

    def is_raw(self) -> bool:
        """Return whether the request asks for output without the last activation. Raises: InvalidInput."""
        stated = {self.use_activation, self.softmax, self.activation} - {None}
        if len(stated) > 1:
            raise InvalidInput(
                "`use_activation`, `softmax` and `activation` mean the same: send the first of them",
                param="use_activation",
            )
        return False in stated

    def call(self, work: Any, model: str | None) -> Call:
        """Return the call of a request at vLLM's own paths. Raises: InvalidInput."""
        instruction = self.checked_instruction()
        return Call(work, model, self.cuts, self.side, instruction=instruction, prompt_tokens=self.length)


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
CHAT_FIELDS = TEXT_FIELDS | {"messages", "chat_template", "add_generation_prompt", "continue_final_message"}
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


# The header has about 120 bytes for each input. Common clients refuse a header line of 64 KiB.
METADATA_INPUTS_MAX = 256


class VllmUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class VllmReply(msgspec.Struct):
    """Fields of every reply, without its items."""

    id: str
    created: int
    model: str
    usage: VllmUsage


async def reply_with(request: Request[Any], served: Served, kind: str, items: LazyList) -> HttpReply:
    """Return a reply with its items. kind: the prefix of its id."""
    head = reply_head(kind, request.context, request.body.request_id)
    frame = {"object": "list", "model": served.route.model, "data": items, "usage": usage_of(served)}
    return await request.reply(served, head | frame)


async def reply_packed(
    request: Request[Any], served: Served, rows: Iterable[Vectors], numbers: NumberFormat
) -> HttpReply:
    """Return a reply of bytes, which the header `metadata` describes unless the body asks for no header."""
    body, items = await encode_bytes(rows, numbers)
    headers = None
    if request.body.encoding_format == "bytes":
        head = reply_head("embd", request.context, None) | {"model": served.route.model}
        headers = {"metadata": json.dumps(head | {"data": items, "usage": usage_of(served)})}
    return request.reply_bytes(served, body, headers, OCTETS)


def reply_head(kind: str, context: RequestContext, request_id: str | None) -> dict[str, Any]:
    """Return the id and the time of a reply. The header `x-request-id` precedes the id in the body."""
    is_callers = context.header(b"x-request-id") == context.request_id
    name = context.request_id if is_callers else request_id or context.request_id
    return {"id": f"{kind}-{name}", "created": int(time.time())}


def usage_of(served: Served) -> dict[str, Any]:
    """Return the tokens of a reply."""
    tokens = served.reply.tokens
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def check_metadata(encoding_format: str | None, inputs: int) -> None:
    """Check that the header of a reply in bytes is not too long. Raises: InvalidInput."""
    if encoding_format == "bytes" and inputs > METADATA_INPUTS_MAX:
        raise InvalidInput(
            f"`bytes` describes at most {METADATA_INPUTS_MAX} inputs in a header: send `bytes_only`, "
            "or fewer inputs",
            param="encoding_format",
        )


async def encode_bytes(
    rows: Iterable[Vectors], numbers: NumberFormat
) -> tuple[memoryview, list[dict[str, Any]]]:
    """Return the rows one after the other, and the place and shape of each.

    The event loop runs on between the rows of a large reply.
    """
    body, items, paused = bytearray(), [], 0
    for index, row in enumerate(rows):
        start = len(body)
        body += numbers.pack(row)
        item = {"index": index, "embed_dtype": numbers.dtype, "endianness": numbers.endianness}
        items.append(item | {"start": start, "end": len(body), "shape": row.shape})
        if len(body) - paused >= PAUSE_BYTES:
            paused = len(body)
            await asyncio.sleep(0)
    return memoryview(body), items
