"""Queries and documents with images, and the work that they become.

Source: Jina's reranker m0, vLLM 0.33 (scoring of multi-modal contents), and SIE 0.3.1.
"""

from collections.abc import Sequence

from backends.contract import Operation
from gateway.calls import ScoreParts
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import Fetch, SoundSource, SourcePart, fetch_sources, read_parts


async def score_parts(
    queries: tuple[str, Sequence[Sequence[SourcePart]]],
    documents: tuple[str, Sequence[Sequence[SourcePart]]],
    fetch: Fetch | None,
    *,
    raw: bool,
) -> ScoreParts:
    """Return the work of one query with each document, or of as many queries as documents.

    queries, documents: their fields of the body, and their parts. fetch: as in `fetch_sources`.
    Raises: EmptyInput, InvalidInput, and the errors of `fetch`.
    """
    (query_field, query_parts), (field, parts) = queries, documents
    if len(query_parts) not in (1, len(parts)):
        raise InvalidInput(
            f"{len(query_parts)} inputs against {len(parts)}: lengths are 1:1, 1:N or N:N", param=query_field
        )
    for name, items in (queries, documents):
        _check(items, name)

    # Together, so that an address of both sides is fetched once, and within the bounds of one request.
    fetched = await fetch_sources([*query_parts, *parts], Operation.RERANK_IMAGE, fetch)
    first = await read_parts(query_parts, query_field, fetched)
    second = await read_parts(parts, field, fetched)
    return ScoreParts(tuple(zip(first * (len(second) // len(first)), second, strict=True)), raw)


def _check(items: Sequence[Sequence[SourcePart]], field: str) -> None:
    """Check that no input is empty or a recording. Raises: EmptyInput, InvalidInput."""
    for index, parts in enumerate(items):
        if not parts or "" in parts:
            raise EmptyInput(f"`{field}` {index} is empty, or has an empty text", param=field)
        if any(isinstance(part, SoundSource) for part in parts):
            raise InvalidInput(f"`{field}` {index} is sound; texts and images are ranked", param=field)
