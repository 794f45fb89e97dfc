"""Groups of upstreams of all models that have several, a canary or a mirror; rebuilt by each reload."""

import asyncio
from collections.abc import Collection, Mapping

from gateway.config.schema import ModelSettings
from gateway.events import Event, Observe, ReplicaChanged, SpaceChecked
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.judging import Canary, Judge
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.fingerprint import Fingerprint
from gateway.vector_spaces.model_space import ModelSpace, ModelSpaceStore
from gateway.vector_spaces.space import FOLLOW_EVERY_S


class GroupRegistry:
    """Groups by model. store: of the spaces that gateways share, None without one."""

    def __init__(self, observe: Observe, store: ModelSpaceStore | None) -> None:
        self.groups: dict[str, UpstreamGroup] = {}
        self._observe = observe
        self._store = store
        # The upstream of each model that has only one: it defines the space if the model gets more.
        self._only: dict[str, Upstream] = {}
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
        if before is not None and not is_restored and settings.canary == before.settings.canary:
            canary = before.canary
        mirror = None if settings.mirror is None else upstreams[settings.mirror.name]
        group = UpstreamGroup(
            settings, space, Judge(settings, upstreams, space, canary, self._observe), mirror
        )
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
