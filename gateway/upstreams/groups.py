"""Groups of upstreams of all models that have several, a canary or a mirror; rebuilt by each reload."""

import asyncio
from collections.abc import Collection, Iterator, Mapping

from gateway.config.problems import Problem
from gateway.config.schema import Config, ModelSettings
from gateway.events import Event, Observe, ReplicaChanged, SpaceChecked
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.judging import Canary, Judge
from gateway.upstreams.upstream import Upstream
from gateway.upstreams.upstreams import is_same_server
from gateway.vector_spaces.fingerprint import Fingerprint, matches
from gateway.vector_spaces.model_space import ModelSpace, difference
from gateway.vector_spaces.space import FOLLOW_EVERY_S
from gateway.vector_spaces.store import ModelSpaceStore


class Groups:
    """Groups by model. store: of the spaces that gateways share, None without one."""

    def __init__(self, observe: Observe, store: ModelSpaceStore | None) -> None:
        self.groups: dict[str, UpstreamGroup] = {}
        self._observe = observe
        self._store = store
        # The upstream of each model that has only one: it defines the space if the model gets more.
        self._only: dict[str, Upstream] = {}
        self._upstreams: Mapping[str, Upstream] = {}
        self._changed = asyncio.Event()

    def apply(
        self,
        models: Mapping[str, ModelSettings],
        upstreams: Mapping[str, Upstream],
        restored: Collection[str] | None = None,
    ) -> None:
        """Switch to the models of a config.

        upstreams: of the config. restored: models whose withdrawn canary is put back; None, all of them.
        """
        self.groups = {
            name: self._create(name, settings, upstreams, is_restored=restored is None or name in restored)
            for name, settings in models.items()
            if settings.is_group
        }
        self._only = {
            name: upstreams[settings.upstream] for name, settings in models.items() if not settings.is_group
        }
        self._upstreams = upstreams
        self.wake()

    def observe(self, event: Event) -> None:
        """Judge the upstreams again after an event on which that depends."""
        if self.groups and isinstance(event, ReplicaChanged | SpaceChecked):
            self.wake()

    def wake(self) -> None:
        """Look at all upstreams again."""
        for group in self.groups.values():
            group.wake()
        self._changed.set()

    @property
    def is_settled(self) -> bool:
        """True unless gateways are about to agree on the space of a model, which a lost Redis ends too."""
        spaces = [group.space for group in self.groups.values()]
        return all(space.reference is not None or space.wanted is None for space in spaces)

    def withdraw(self, model: str, upstream: str, reason: str) -> None:
        """Withdraw a canary that another worker has withdrawn."""
        group = self.groups.get(model)
        canary = None if group is None else group.judge.canary
        if group is not None and canary is not None and canary.settings.name == upstream:
            canary.withdraw(reason)
            group.wake()

    def differing_spaces(self, config: Config) -> tuple[Problem, ...]:
        """Return the upstreams of a config's models that are known to be of another space than the first.

        Upstreams with other settings than the running ones are not known yet.
        """
        known: dict[str, Fingerprint] = {}
        for name, upstream in self._upstreams.items():
            wanted, fingerprint = config.upstreams.get(name), upstream.checked_fingerprint
            if fingerprint is not None and wanted is not None and is_same_server(upstream.settings, wanted):
                known[name] = fingerprint
        return tuple(
            problem
            for name, model in config.models.items()
            if model.is_group
            for problem in _space_problems(name, model, known)
        )

    async def maintain(self) -> None:
        """Agree with other gateways on the spaces of models, until cancelled."""
        while self._store is not None:
            try:
                async with asyncio.timeout(FOLLOW_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            for group in list(self.groups.values()):
                before = group.space.reference
                await group.space.share()
                if group.space.reference is not before:
                    group.wake()

    def _create(
        self, name: str, settings: ModelSettings, upstreams: Mapping[str, Upstream], *, is_restored: bool
    ) -> UpstreamGroup:
        before = self.groups.get(name)
        space = ModelSpace(name, [member.name for member in settings.members], self._store)
        canary = None if settings.canary is None else Canary(settings.canary)
        if before is not None and not is_restored and settings.canary == before.model_settings.canary:
            canary = before.judge.canary
        mirror = None if settings.mirror is None else upstreams[settings.mirror.name]
        judge = Judge(settings, upstreams, space, canary, self._observe)
        group = UpstreamGroup(settings, space, judge, mirror, self._observe)
        if (reference := self._reference_of(name, group)) is not None:
            space.inherit(reference)
        if before is not None:
            group.inherit(before)
        return group

    def _reference_of(self, model: str, group: UpstreamGroup) -> Fingerprint | None:
        """Return the space in which a model was served until now, if it keeps one of its upstreams."""
        before, only = self.groups.get(model), self._only.get(model)
        if before is not None and not before.judge.judged.keys().isdisjoint(group.judge.judged):
            return before.space.reference
        if only is not None and only.name in group.judge.judged:
            return only.checked_fingerprint
        return None


def _space_problems(name: str, model: ModelSettings, known: Mapping[str, Fingerprint]) -> Iterator[Problem]:
    """Yield the upstreams of a model that are known to be of another space than the first known one."""
    places = [(f"models.{name}.upstreams[{i}].name", each.name) for i, each in enumerate(model.members)]
    if model.canary is not None:
        places.append((f"models.{name}.canary.name", model.canary.name))
    found = [(place, upstream, known[upstream]) for place, upstream in places if upstream in known]
    for place, upstream, fingerprint in found[1:]:
        _, first, reference = found[0]
        if not matches(reference, fingerprint, None):
            yield Problem(place, f"{upstream!r} and {first!r}: {difference(reference, fingerprint)}")
