"""Models of hosted APIs as data: the requests of each kind of work, and what the API takes. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from backends.contract import BaseWork, Operation, Truncate, Vectors, Work
from backends.contract.errors import BackendError
from backends.http.answers import translate_decode_errors
from backends.http.client import UpstreamResponse
from backends.http.replies import check_vectors, float32

# Key of `types` for inputs whose role is not known.
DEFAULT_TYPE = "default"
Body = dict[str, Any]


class Request(NamedTuple):
    """One request. places: of its inputs in the work."""

    path: str
    body: Body
    places: Sequence[int]


class Rows(NamedTuple):
    """Content of a reply. values: (inputs, width) vectors, or (inputs,) scores, float32.

    tokens: None if they are not reported. truncated: inputs that were cut, None if that is not reported.
    """

    values: Vectors
    tokens: int | None = None
    truncated: tuple[int, ...] | None = None


class HostedRoute(NamedTuple):
    """Requests and reply of one kind of work.

    encode: returns the requests of a work with at most `request_inputs` inputs. decode: reads the reply to
    one of them, with as many inputs.
    """

    encode: Callable[[Any, "HostedModel"], list[Request]]
    decode: Callable[[UpstreamResponse, int], Rows]


class HostedModel(msgspec.Struct, frozen=True):
    """One model of a hosted API.

    name: as requests have it. path: of the model, or of its requests. version: name of the API for operators.
    routes: by kind of work. failure: converts a response whose status is not 200. types: the API's word for
    each role, and for `DEFAULT_TYPE`. prompts: texts of roles that the model reads before its input.
    truncation: treatments of long inputs that the API offers, empty if it refuses them always. widths: values
    of `dimensions` that the API takes; others are cut here unless `has_fixed_widths`. plain_vectors: vectors
    that are not normalized are offered. raw_scores: scores are asked for raw. media: kinds of media that an
    input may have.
    """

    name: str
    path: str
    version: str
    routes: Mapping[type[BaseWork], HostedRoute]
    failure: Callable[[UpstreamResponse], BackendError]
    types: Mapping[str, str] = {}
    prompts: Mapping[str, str] = {}
    truncation: frozenset[Truncate] = frozenset()
    request_inputs: int | None = None
    request_tokens: int | None = None
    request_bytes: int | None = None
    max_tokens: int | None = None
    widths: tuple[int, ...] = ()
    has_fixed_widths: bool = False
    plain_vectors: bool = False
    raw_scores: bool = False
    media: frozenset[Operation] = frozenset()

    def type_of(self, work: Any) -> str | None:
        """Return the API's word for the role of the inputs, None if it gets none."""
        return self.types.get(work.prompt_name or DEFAULT_TYPE)

    def width_of(self, work: Any) -> int | None:
        """Return the dimensions to ask for, None for the model's own."""
        return work.dimensions if work.dimensions in self.widths else None


def every_place(work: Work) -> range:
    """Return the places of all inputs of a work."""
    return range(len(work.inputs))


def vectors_of(rows: Sequence[Sequence[float]], expected: int) -> Vectors:
    """Convert the vectors of a reply, (expected, dim) float32. Raises: ReplicaFailed."""
    with translate_decode_errors():
        vectors = float32(rows)
    check_vectors(vectors, expected)
    return vectors
