"""Parts of every adapter over HTTP: its table of kinds of work, its connections, and kinds of output.

A wire that returns one kind of output per request is asked once for each. Rule: an input's tokens are counted
once, however often it is sent.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from backends.contract import (
    Embed,
    EmbedParts,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Reply,
    ScoreParts,
    Work,
)
from backends.contract.errors import ReplicaFailed, UnsupportedWork
from backends.contract.refusals import refused_chunks, refused_pairs, refused_parts
from backends.contract.work import BaseWork
from backends.http.client import UpstreamClient, countdown


class Route(NamedTuple):
    """Request and reply of one kind of work on one wire.

    encode: returns the path of the work's request, or its method, and the body. decode: returns the reply.
    """

    encode: Callable[..., tuple[str, Any]]
    decode: Callable[..., Reply]


Routes: TypeAlias = Mapping[type[BaseWork], Route]


def route_of(work: Work, routes: Routes) -> Route:
    """Return the route of a kind of work. Raises: UnsupportedWork."""
    if (route := routes.get(type(work))) is None:
        if isinstance(work, EmbedParts):
            raise refused_parts()
        if isinstance(work, ScoreParts):
            raise refused_pairs()
        if work.joins_chunks:
            raise refused_chunks()
        raise UnsupportedWork(f"this upstream's wire does not carry {work.operation}")
    return route


def operations_in(routes: Routes) -> frozenset[Operation]:
    """Return the operations that a wire can carry."""
    return frozenset(work.kind for work in routes)


class HttpBackend:
    """Connections of one server."""

    def __init__(self, http: UpstreamClient) -> None:
        self._http = http

    def drop_connections(self) -> None:
        """Close the idle connections to the server."""
        self._http.drop_connections()

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._http.aclose()


def check_outputs(work: Encode, offered: frozenset[Output]) -> None:
    """Check that the model offers every requested kind of output.

    Raises: UnsupportedWork.
    """
    missing = sorted(work.outputs - offered)
    if missing:
        raise UnsupportedWork(f"this upstream's model gives no {missing[0]} output")


def split_outputs(work: Encode) -> list[Embed | Encode]:
    """Split the work into parts of one kind of output each, dense first."""
    parts: list[Embed | Encode] = []
    for output in Output:
        if output not in work.outputs:
            continue
        if output is Output.DENSE:
            parts.append(Embed(work.inputs, work.normalize, work.dimensions, work.prompt_name, work.truncate))
        else:
            parts.append(msgspec.structs.replace(work, outputs=frozenset({output})))
    return parts


def single_output(work: Encode) -> Output:
    """Return the kind of output that a part requests."""
    (output,) = work.outputs
    return output


async def run_outputs(
    work: Work, request: Callable[[Any, float], Awaitable[Reply]], timeout_s: float
) -> Reply:
    """Execute one piece of work, in one request per kind of output. Raises: BackendError."""
    if not isinstance(work, Encode):
        return await request(work, timeout_s)
    remaining_s = countdown(timeout_s)
    return merge_replies([await request(part, remaining_s()) for part in split_outputs(work)])


def merge_replies(replies: Sequence[Reply]) -> EncodeReply:
    """Merge the replies to the parts of one work.

    Raises: ReplicaFailed, if a reply is of a different operation.
    """
    merged = EncodeReply(0)
    for reply in replies:
        if isinstance(reply, EncodeReply):
            merged = msgspec.structs.replace(
                merged,
                sparse=reply.sparse or merged.sparse,
                multivector=reply.multivector or merged.multivector,
                token_vectors=reply.token_vectors or merged.token_vectors,
            )
        elif reply.dense_vectors is None:
            raise ReplicaFailed("the upstream's reply belongs to a different operation")
        else:
            merged = msgspec.structs.replace(merged, dense=reply.dense_vectors)
    tokens = max(reply.tokens for reply in replies)
    return msgspec.structs.replace(merged, tokens=tokens, truncated=_truncated(replies))


def _truncated(replies: Sequence[Reply]) -> tuple[int, ...] | None:
    """Return the inputs truncated in any part, or None if they are unknown for one part."""
    cut: set[int] = set()
    for reply in replies:
        if reply.truncated is None:
            return None
        cut.update(reply.truncated)
    return tuple(sorted(cut))
