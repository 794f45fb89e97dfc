"""Parts of minutes become chunks. Pure: it takes bytes and returns bytes, so that it can run on a thread.

A part that cannot be read counts as folded: it would stay for ever otherwise. The busiest tenants are chosen
by the calls of the whole chunk, so that a tenant keeps its row for an hour, and in the longer view for a day,
and one that becomes busy gets a row with the next chunk.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from gateway.history.store import CHUNK_S, DAY_S, HEAD, HOUR_S, MINUTE_S, SHARDS, Chunk, Resolution, sharded
from gateway.history.table import (
    Detail,
    Table,
    UnreadableTable,
    added,
    in_one_interval,
    limited,
    packed,
    unpacked,
)

# Tenants with a row of their own in a chunk.
TENANTS_MAX = 1000
# Tenants in the part of a minute: those that are chosen for the chunk must be among them.
PART_TENANTS_MAX = 4000
ALL_SHARDS = (HEAD, *range(SHARDS))
INTERVALS: Mapping[Resolution, int] = {"minute": HOUR_S // MINUTE_S, "hour": DAY_S // HOUR_S}


def places_of(hour_s: int) -> list[Chunk]:
    """Return the chunks that the parts of an hour go to."""
    day_s = hour_s - hour_s % CHUNK_S["hour"]
    minutes = [Chunk("minute", hour_s, shard) for shard in ALL_SHARDS]
    return minutes + [Chunk("hour", day_s, shard) for shard in ALL_SHARDS]


def folded(
    hour_s: int, parts: Mapping[int, Iterable[bytes]], known: Mapping[Chunk, bytes | None]
) -> Mapping[Chunk, bytes]:
    """Return the chunks with the parts of an hour added.

    parts: by minute since 1970. known: content of `places_of`, None for those that are not there.
    """
    first = hour_s // MINUTE_S
    tables = [(minute - first, table) for minute, contents in parts.items() for table in readable(contents)]
    hour = in_one_interval(added(INTERVALS["minute"], tables))
    day_s = hour_s - hour_s % DAY_S
    additions: tuple[tuple[Resolution, int, Sequence[tuple[int, Table]]], ...] = (
        ("minute", hour_s, tables),
        ("hour", day_s, [((hour_s - day_s) // HOUR_S, hour)]),
    )
    chunks: dict[Chunk, bytes] = {}
    for resolution, start_s, new in additions:
        before = {
            place: content
            for place, content in known.items()
            if place.resolution == resolution and content is not None
        }
        whole = added(INTERVALS[resolution], [*((0, table) for table in readable(before.values())), *new])
        shards = sharded(limited(whole, TENANTS_MAX))
        chunks |= {Chunk(resolution, start_s, shard): packed(table) for shard, table in shards.items()}
        # A shard whose tenants have all lost their rows.
        nothing = packed(added(INTERVALS[resolution], []))
        chunks |= {place: nothing for place in before if place not in chunks}
    return chunks


def merged(contents: Iterable[bytes]) -> bytes:
    """Return the sum of the parts of one minute as one part."""
    return packed(limited(added(1, [(0, table) for table in readable(contents)]), PART_TENANTS_MAX))


def readable(contents: Iterable[bytes], detail: Detail = "all") -> list[Table]:
    """Return the tables among contents."""
    tables = []
    for content in contents:
        with suppress(UnreadableTable):
            tables.append(unpacked(content, detail))
    return tables
