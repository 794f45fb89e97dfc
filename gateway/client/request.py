"""Request for vectors, and the space of those that arrive. It loads nothing heavy.

`gateway embed` stores both structs next to its outputs.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gateway.client.errors import CallFailed

EMBED_PATH, OPENAI_PATH = "/embed", "/v1/embeddings"
SIDES = {"error": "NONE", "left": "START", "right": "END"}


class Request(msgspec.Struct, frozen=True):
    """Address and fields of a call, without its texts. path: decides the API, and so the fields of a body."""

    base: str
    path: str
    model: str | None = None
    dimensions: int | None = None
    input_type: str | None = None
    prompt_name: str | None = None
    truncate: Literal["error", "left", "right"] | None = None

    @property
    def url(self) -> str:
        """The address of a call."""
        return self.base + self.path

    @property
    def is_tei(self) -> bool:
        """The API is that of TEI, and otherwise that of OpenAI."""
        return self.path.endswith(EMBED_PATH)

    def body(self, texts: Sequence[str], *, packed: bool) -> bytes:
        """Return the body of a call. packed: ask for base64, where the server does not return Arrow."""
        content: dict[str, Any] = {"model": self.model, "dimensions": self.dimensions}
        if self.is_tei:
            content["prompt_name"] = self.prompt_name
            if self.truncate is not None:
                content["truncate"] = self.truncate != "error"
                if self.truncate != "error":
                    content["truncation_direction"] = self.truncate.capitalize()
        else:
            content["input_type"] = self.input_type
            content["truncate"] = SIDES.get(self.truncate or "")
            content["encoding_format"] = "base64" if packed else None
        given = {name: value for name, value in content.items() if value is not None}
        return msgspec.json.encode(given | {"inputs" if self.is_tei else "input": texts})


class Space(msgspec.Struct, frozen=True):
    """Vector space of the replies. fingerprint: None if the server reports none."""

    dimensions: int
    fingerprint: str | None = None
    model: str | None = None

    def difference(self, other: "Space") -> str:
        """Return in words how another reply's space differs; empty if it does not."""
        if self.fingerprint != other.fingerprint:
            return f"fingerprint {other.fingerprint or 'none'} instead of {self.fingerprint or 'none'}"
        if self.dimensions != other.dimensions:
            return f"{other.dimensions} dimensions instead of {self.dimensions}"
        if self.fingerprint is None and None not in (self.model, other.model) and self.model != other.model:
            return f"model {other.model} instead of {self.model}"
        return ""


def same_space(first: Space | None, second: Space | None) -> Space | None:
    """Return the vector space of both replies; None if neither has vectors. Raises: CallFailed."""
    if second is not None and second.fingerprint == "mixed":
        raise CallFailed(
            "the gateway reports the fingerprint `mixed`: replicas with different vectors serve this model; "
            "see `gateway verify`"
        )
    if first is None or second is None:
        return first or second
    if difference := first.difference(second):
        raise CallFailed(
            f"the server's vectors are of another space than those of this output: {difference}; "
            "vectors of two spaces cannot be compared, so the output must be made again from its beginning"
        )
    return first
