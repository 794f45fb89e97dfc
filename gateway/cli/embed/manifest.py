"""Manifest of a run and facts of its parts; what a resumed run must have in common with the first. Pure."""

from typing import Any

import msgspec

from gateway.cli.embed.packing import Position
from gateway.cli.embed.plan import OnEmpty, Plan, Request, Source


class Counts(msgspec.Struct, frozen=True):
    """Sums over rows. skipped: without text and left out. empty: without text, with a null for the vector.

    bad: left out. truncated: texts that the server cut; unknown_cuts: replies that do not name them.
    """

    rows: int = 0
    embedded: int = 0
    empty: int = 0
    skipped: int = 0
    bad: int = 0
    truncated: int = 0
    unknown_cuts: int = 0
    tokens: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums of both."""
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Counts(*(a + b for a, b in zip(mine, others, strict=True)))


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


class PartFacts(msgspec.Struct, frozen=True):
    """State of a run behind a part. seconds: of work.

    problems: the first rows that were left out, in words. cuts: the first texts that the server cut.
    """

    end: Position = Position()
    counts: Counts = Counts()
    space: Space | None = None
    problems: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    seconds: float = 0.0


class Manifest(msgspec.Struct, frozen=True):
    """Settings of a run that decide its rows and vectors, and its inputs."""

    sources: tuple[Source, ...]
    field: str
    id_field: str | None
    delimiter: str | None
    on_empty: OnEmpty
    request: Request
    column: str
    version: int = 1
    encoding: str | None = None


def manifest_of(plan: Plan, field: str) -> Manifest:
    """Return the manifest of a plan. The address may change: another gateway may go on."""
    reading = plan.reading
    return Manifest(
        plan.sources,
        field,
        reading.id_field,
        reading.delimiter,
        reading.on_empty,
        msgspec.structs.replace(plan.request, base=""),
        plan.output.column,
        encoding=reading.encoding,
    )


def refusal(before: Manifest, now: Manifest) -> str:
    """Return why a run cannot continue another one; empty if it can.

    A run that stopped at the first row without text has left none out, and may continue in another way.
    """
    if before.on_empty == "error":
        before = msgspec.structs.replace(before, on_empty=now.on_empty)
    if before == now:
        return ""
    if before.sources != now.sources:
        return _source_refusal(before.sources, now.sources)
    then, today = _settings(before), _settings(now)
    changes = [
        f"{name} was {then[name]!r} and is {today[name]!r}" for name in then if then[name] != today[name]
    ]
    return "; ".join(changes)


def _source_refusal(before: tuple[Source, ...], now: tuple[Source, ...]) -> str:
    if [source.path for source in before] != [source.path for source in now]:
        names = ", ".join(source.path for source in before[:5])
        return f"the input was {names}{' …' if len(before) > 5 else ''}"
    changed = next(old for old, new in zip(before, now, strict=True) if old != new)
    return f"{changed.path} has changed"


def _settings(manifest: Manifest) -> dict[str, Any]:
    fields = msgspec.to_builtins(manifest)
    request = fields.pop("request")
    del fields["sources"]
    return {f"--{name.replace('_', '-')}": value for name, value in (fields | request).items()}
