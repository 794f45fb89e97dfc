"""Wire of vLLM's pooling server: its structs, request bodies, decoding of replies, and errors, without I/O.

Source: vLLM 0.33.0 (entrypoints/pooling), run at 0.32.0, and the differences of 0.20, 0.11 and 0.8.5.
Releases before 0.33 read one conversation a request.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from backends.contract import (
    Chat,
    Classify,
    Embed,
    EmbedParts,
    Encode,
    Output,
    Part,
    Token,
    Turn,
    Turns,
    Vectors,
)
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    UnsupportedWork,
    input_too_long,
)
from backends.http.answers import decode_json, in_order, translate_decode_errors
from backends.http.client import UpstreamResponse
from backends.http.media import content_of
from backends.http.openai_wire import (
    REFUSAL_TYPES,
    REFUSED_INPUT,
    TokenCounts,
    context_length_in,
    error_of,
    refused_input,
)
from backends.http.replies import order_scores, score_matrix, token_matrices
from backends.http.statuses import status_error, with_answer

EMBEDDINGS, SCORE, POOLING, CLASSIFY = "/v1/embeddings", "/v1/score", "/pooling", "/classify"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BASE64 = {"encoding_format": "base64", "endianness": "little"}

Body = dict[str, Any]


class PairScoreItem(msgspec.Struct, frozen=True):
    """One score; index is that of the document."""

    score: float
    index: int | None = None


class ScoreResponse(msgspec.Struct, frozen=True):
    """Body of POST /v1/score."""

    data: list[PairScoreItem]
    usage: TokenCounts = TokenCounts()


class ClassScoresItem(msgspec.Struct, frozen=True):
    """Class scores of one input by class id; the wire names only the most likely class."""

    probs: list[float]
    index: int | None = None


class ClassifyResponse(msgspec.Struct, frozen=True):
    """Body of POST /classify."""

    data: list[ClassScoresItem]
    usage: TokenCounts = TokenCounts()


class TokenEmbedItem(msgspec.Struct, frozen=True):
    """Token vectors of one input."""

    data: list[list[float]]
    index: int | None = None


class TokenEmbedResponse(msgspec.Struct, frozen=True):
    """Body of POST /pooling for the task token_embed."""

    data: list[TokenEmbedItem]
    usage: TokenCounts = TokenCounts()


class TokenizedText(msgspec.Struct, frozen=True):
    """Body of POST /tokenize for one text."""

    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(msgspec.Struct, frozen=True):
    """Body of POST /detokenize for one list of ids."""

    prompt: str


class VersionResponse(msgspec.Struct, frozen=True):
    """Body of GET /version."""

    version: str


def input_fields(work: Embed | Encode | Classify) -> Body:
    """Return the fields that carry the inputs of a request. Raises: UnsupportedWork."""
    if work.chat is None:
        return {"input": work.inputs} | ({} if work.special_tokens else {"add_special_tokens": False})
    if len(work.inputs) != 1:
        raise UnsupportedWork("vLLM reads one conversation in a request")
    (conversation,) = work.inputs
    assert isinstance(conversation, str)
    messages = {"messages": msgspec.Raw(conversation.encode()), "add_special_tokens": work.special_tokens}
    return messages | _template_fields(work.chat)


def parts_body(work: EmbedParts, index: int, raw_switch: str | None) -> Body:
    """Return the body of a request for one of several inputs with images or sound.

    raw_switch: turns the normalization off, if the server has one. Raises: UnsupportedWork.
    """
    if not work.normalize and raw_switch is None:
        raise UnsupportedWork("this upstream always normalizes its vectors")
    if work.max_tokens is not None:
        raise UnsupportedWork("vLLM cuts no input with images or sound: leave out `truncate_prompt_tokens`")
    switch: Body = {raw_switch: False} if raw_switch else {}
    form: Body = BASE64 if work.output is Output.DENSE else {"task": "token_embed"}
    fields: Body = {} if work.chat is None else _template_fields(work.chat)
    if work.special_tokens:
        fields["add_special_tokens"] = True
    parts = work.inputs[index]
    if work.chat is None and len(parts) == 1 and isinstance(parts[0], str):
        # As a request for texts alone, so that its vector does not depend on its company.
        return {"input": parts[0]} | form | switch
    turns = work.turns[index] if work.turns else (Turn("user", len(parts)),)
    return {"messages": _messages(turns, parts)} | fields | form | switch


def _messages(turns: Turns, parts: Sequence[Part]) -> list[Body]:
    """Return the messages of a conversation. parts: of all messages, one after the other."""
    rest, messages = iter(parts), []
    for turn in turns:
        own = list(islice(rest, turn.parts))
        named: Body = {} if turn.name is None else {"name": turn.name}
        content: Any = own[0] if turn.is_text else content_of(own)
        messages.append({"role": turn.role, "content": content} | named)
    return messages


def side_of(parts: Sequence[Part]) -> msgspec.Raw:
    """Return one side of a pair with pictures, as the JSON of `text_1` or `text_2`.

    A lone text is a text, so that its score does not depend on the other side.
    """
    is_text = len(parts) == 1 and isinstance(parts[0], str)
    return msgspec.Raw(msgspec.json.encode((parts[0] or " ") if is_text else {"content": content_of(parts)}))


def _template_fields(chat: Chat) -> Body:
    template: Body = {} if chat.template is None else {"chat_template": chat.template}
    variables: Body = (
        {} if chat.variables == "{}" else {"chat_template_kwargs": msgspec.Raw(chat.variables.encode())}
    )
    return {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        **template,
        **variables,
    }


def explain_refusal(error: BackendError, chat: Chat | None) -> BackendError:
    """Return the error of a refused conversation with the likely reason."""
    if chat is None or not error.message.startswith(REFUSED_INPUT):
        return error
    if chat.template is not None:
        return InvalidWork(
            "the upstream refused `chat_template`: vLLM takes one only with --trust-request-chat-template; "
            "leave it out",
        )
    return InvalidWork(
        f"{error.message}: the model may have no chat template, or one that refuses these `messages`; "
        "send `input`"
    )


def restore_status(response: UpstreamResponse) -> UpstreamResponse:
    """Replace status 200 of an error with the status in its body; releases up to 0.11 send such errors."""
    if response.status != 200 or b'"error"' not in response.body[:64]:
        return response
    code = error_of(response).code
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return msgspec.structs.replace(response, status=status)


def is_own_error(response: UpstreamResponse) -> bool:
    """Return whether an error is in vLLM's or its web framework's form, and not that of a proxy in front."""
    try:
        body = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(body, dict) and not body.keys().isdisjoint({"error", "detail", "message"})


def decode_scores(response: UpstreamResponse, expected: int) -> tuple[Vectors, int | None]:
    """Decode the scores in document order, (expected,) float32, and the tokens, or None if not reported.

    Raises: ReplicaFailed.
    """
    reply = decode_json(response.body, ScoreResponse)
    ranks = [(item.index, item.score) for item in reply.data]
    return order_scores(ranks, expected, "data"), reply.usage.tokens


def decode_classes(
    response: UpstreamResponse, expected: int, labels: int | None = None
) -> tuple[Vectors, int | None]:
    """Decode the class scores, (expected, n_labels) float32, and the tokens, or None if not reported.

    labels: the number of classes; None accepts any number.

    Raises: ReplicaFailed.
    """
    reply = decode_json(response.body, ClassifyResponse)
    rows = [item.probs for item in _in_order(reply.data)]
    count = labels if labels is not None else len(rows[0]) if rows else 0
    return score_matrix(rows, expected, count), reply.usage.tokens


def decode_token_vectors(
    response: UpstreamResponse, expected: int, max_tokens: int | None
) -> tuple[tuple[Vectors, ...], int | None]:
    """Decode the token vectors of each input, (its tokens, dim) float32, and the tokens, or None.

    Raises: ReplicaFailed.
    """
    reply = decode_json(response.body, TokenEmbedResponse)
    lists = [item.data for item in _in_order(reply.data)]
    with translate_decode_errors():
        return token_matrices(lists, expected, max_tokens), reply.usage.tokens


def _in_order(items: Sequence[Any]) -> list[Any]:
    """Sort the items of a reply by index and check that each input has one."""
    return [items[place] for place in in_order([item.index for item in items], "data", listed=True)]


def tokenize_body(text: str, *, special: bool) -> Body:
    """Return the body of POST /tokenize."""
    return {"prompt": text, "add_special_tokens": special, "return_token_strs": True}


def decode_tokenize(response: UpstreamResponse) -> TokenizedText:
    """Decode the reply to POST /tokenize.

    Raises: ReplicaFailed.
    """
    return decode_json(response.body, TokenizedText)


def decode_detokenize(response: UpstreamResponse) -> str:
    """Decode the text in the reply to POST /detokenize.

    Raises: ReplicaFailed.
    """
    return decode_json(response.body, DetokenizedText).prompt


def tokens_of(reply: TokenizedText, specials: tuple[int, int]) -> tuple[Token, ...]:
    """Convert the tokens of one text; this wire has no offsets, therefore start and stop are None.

    specials: the number of special tokens before and after the text.
    """
    texts = reply.token_strs or [""] * len(reply.tokens)
    if len(texts) != len(reply.tokens):
        raise ReplicaFailed("the upstream's tokens and their texts differ in number")
    before, after = specials
    last = len(texts) - after
    return tuple(
        Token(id_, text, special=not before <= index < last)
        for index, (id_, text) in enumerate(zip(reply.tokens, texts, strict=True))
    )


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    error = error_of(response)
    match response.status:
        case 400 if "maximum context length" in error.message or "maximum model length" in error.message:
            return input_too_long(context_length_in(error.message))
        case 400 if error.type in REFUSAL_TYPES:
            return refused_input(error)
        case 404 | 501 if error.type is not None:
            return ReplicaFailed("the upstream does not offer this model or operation")
        case 503 if error.type is not None:
            # vLLM's own queue bound. A server that is starting, or a proxy, sends no error envelope.
            return ReplicaOverloaded("the upstream's queue is full")
    return status_error(response)
