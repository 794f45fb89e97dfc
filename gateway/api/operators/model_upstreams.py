"""Upstreams of a model in a status snapshot."""

from collections.abc import Iterator, Mapping

from gateway.telemetry.snapshot import ModelUpstreamStatus
from gateway.telemetry.totals import Totals
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.upstream import Upstream


def upstreams_of_model(
    group: UpstreamGroup | None, upstreams: Mapping[str, Upstream], totals: Totals
) -> tuple[ModelUpstreamStatus, ...]:
    """Return the upstreams of a model; none if it has only one, which needs no choice."""
    return () if group is None else tuple(_of_group(group, upstreams, totals))


def _of_group(
    group: UpstreamGroup, upstreams: Mapping[str, Upstream], totals: Totals
) -> Iterator[ModelUpstreamStatus]:
    settings, judgements = group.model_settings, group.judge.judgements

    def calls(upstream: str) -> int:
        labels = {"model": group.model, "upstream": upstream, "outcome": "ok"}
        return int(totals.number("gateway_upstream_calls_total", **labels))

    for member in settings.members:
        judgement = judgements[member.name]
        yield ModelUpstreamStatus(
            member.name,
            "member",
            judgement.standing,
            judgement.reason,
            upstreams[member.name].state,
            calls(member.name),
            member.weight,
            member.priority,
        )
    if (canary := group.judge.canary) is not None:
        name, judgement = canary.settings.name, judgements[canary.settings.name]
        yield ModelUpstreamStatus(
            name,
            "canary",
            judgement.standing,
            judgement.reason,
            upstreams[name].state,
            calls(name),
            share=canary.settings.share,
            cosine=canary.cosine,
            min_cosine=canary.settings.min_cosine,
        )
    if settings.mirror is not None:
        name = settings.mirror.name
        labels = {"model": group.model, "upstream": name, "purpose": "mirror", "outcome": "ok"}
        copies = int(totals.number("gateway_copies_total", **labels))
        state = upstreams[name].state
        yield ModelUpstreamStatus(name, "mirror", "serving", "", state, copies, share=settings.mirror.share)
