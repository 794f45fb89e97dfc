"""Judgement of the upstreams of one model: which of them may serve it, and why the others may not.

Rule: an upstream whose vectors were not compared, or are of another space, serves no call of the model. The
first one whose vectors are known defines the space. Of upstreams of different kinds, the first in the
configuration that is known decides what the model is. Upstreams that contradict each other otherwise
(prompts, length, kind) are refused too: equal texts must not have different vectors.
"""

from collections.abc import Mapping

import msgspec

from backends.contract import FREE_OPERATIONS, Capabilities, Operation, Truncate
from gateway.calls import Call, default_truncation
from gateway.config import schema
from gateway.events import Observe, Standing, UpstreamJudged
from gateway.routing.offers import Facts, Kind, common_capabilities, contradiction, kind_of_model
from gateway.routing.split import Trial
from gateway.upstreams.member import MIXED, JudgedUpstream
from gateway.vector_spaces.fingerprint import Fingerprint, cosine_text
from gateway.vector_spaces.model_space import ModelSpace

# Operations that another one serves, with scores by cosine.
SERVED_BY = {Operation.RERANK: Operation.EMBED, Operation.RERANK_IMAGE: Operation.EMBED_IMAGE}
NOT_COMPARED = "its vectors have not been compared yet"
NOT_AGREED = "the vector space of the model is not known yet"
MIXED_REPLICAS = "its replicas give vectors of different spaces"

# What a judgement depends on, of each upstream, and of all: the space, and whether the canary is withdrawn.
_Known = tuple[Fingerprint | None, Capabilities | None]
_Basis = tuple[Fingerprint | None, bool]


class Judgement(msgspec.Struct, frozen=True):
    """Standing of an upstream in a model, with the reason if it does not serve."""

    standing: Standing
    reason: str = ""


WAITING = Judgement("waiting", NOT_COMPARED)
SERVING = Judgement("serving")


class Canary:
    """State of a canary upstream. withdrawn: why it serves no call any more, "" while it does.

    cosine: the smallest so far to vectors of the model's other upstreams, None before the first comparison.
    """

    def __init__(self, settings: schema.CanarySettings) -> None:
        self.settings = settings
        self.withdrawn = ""
        self.cosine: float | None = None

    def withdraw(self, reason: str) -> None:
        """Let it serve no more calls; the first reason stays."""
        self.withdrawn = self.withdrawn or reason

    def record(self, cosine: float) -> bool:
        """Record a comparison; return True if it withdraws the canary."""
        self.cosine = cosine if self.cosine is None else min(self.cosine, cosine)
        if self.withdrawn or cosine >= self.settings.min_cosine:
            return False
        needed = self.settings.min_cosine
        reached = cosine_text(cosine, needed)
        self.withdrawn = f"its vectors differ: cosine {reached}, {needed} needed; a reload puts it back"
        return True


class Judge:
    """Judge of one model's upstreams.

    members: those that share the calls, in the order of preference. canary: never decides what the others
    have to fit. lead: the first upstream that serves the model, which the others have to fit. observe:
    receives changed judgements.
    """

    def __init__(
        self,
        settings: schema.ModelSettings,
        upstreams: Mapping[str, JudgedUpstream],
        space: ModelSpace,
        canary: Canary | None,
        observe: Observe,
    ) -> None:
        ordered = sorted(settings.members, key=lambda member: member.priority)
        self.members = {member.name: upstreams[member.name] for member in ordered}
        self.judged = dict(self.members)
        self.canary = canary
        if canary is not None:
            self.judged[canary.settings.name] = upstreams[canary.settings.name]
        self._settings = settings
        self._space = space
        self._observe = observe
        self.lead: str | None = None
        self._known: list[_Known] = []
        self._basis: _Basis | None = None
        self._judgements: dict[str, Judgement] = {}
        self._common: Capabilities | None = None

    @property
    def judgements(self) -> Mapping[str, Judgement]:
        """Judgement of each upstream, by name; the canary is the last."""
        self.update()
        return self._judgements

    @property
    def common_capabilities(self) -> Capabilities | None:
        """Capabilities that all upstreams have that serve the model; None while none does."""
        self.update()
        return self._common

    def usable(self) -> list[str]:
        """Return the upstreams that serve the model and have a usable replica now; the canary is the last."""
        judgements = self.judgements
        return [
            name
            for name, upstream in self.judged.items()
            if judgements[name].standing == "serving" and upstream.health == "ready"
        ]

    def trial(self, call: Call) -> Trial | None:
        """Return the canary's share of the calls, None for a call that it does not serve."""
        canary, model = self.canary, self.common_capabilities
        if canary is None or model is None or self.judgements[canary.settings.name].standing != "serving":
            return None
        own = self.judged[canary.settings.name].capabilities
        if own is None or not serves_alike(own, model, call):
            return None
        return Trial(canary.settings.name, canary.settings.share)

    def inherit(self, before: "Judge") -> None:
        """Take over what is known from an earlier config, so that only changes are reported."""
        self.lead = before.lead if before.lead in self.members else None
        earlier = before.judgements
        self._judgements = {name: judgement for name, judgement in earlier.items() if name in self.judged}

    def update(self) -> None:
        """Judge the upstreams again if anything has changed on which that depends."""
        known: list[_Known] = [
            (upstream.checked_fingerprint, upstream.capabilities) for upstream in self.judged.values()
        ]
        is_withdrawn = self.canary is not None and bool(self.canary.withdrawn)
        basis = self._basis
        if (
            basis is not None
            and basis[0] is self._space.reference
            and basis[1] == is_withdrawn
            and all(map(_is_same, known, self._known))
        ):
            return
        self._known = known
        self._propose()
        self._basis = self._space.reference, is_withdrawn
        self._judge_all()

    def _propose(self) -> None:
        """Propose a space, if the vectors of an upstream are known; the canary's never define it."""
        fingerprints = {name: upstream.checked_fingerprint for name, upstream in self.members.items()}
        found = {name: each for name, each in fingerprints.items() if each is not None}
        self._space.propose(found, is_complete=len(found) == len(fingerprints))

    def _judge_all(self) -> None:
        judgements: dict[str, Judgement] = {}
        admitted: list[Facts] = []
        lead: str | None = None
        canary: Facts | None = None
        for name in sorted(self.judged, key=self._precedence):
            judgement = judgements[name] = self._judgement(name, admitted)
            if judgement.standing == "serving" and name in self.members:
                admitted += filter(None, (self._facts(name),))
                lead = lead or name
            elif judgement.standing == "serving":
                canary = self._facts(name)
        self.lead = lead
        self._common = common_capabilities(admitted, canary)
        before, self._judgements = self._judgements, {name: judgements[name] for name in self.judged}
        for name, judgement in self._judgements.items():
            if judgement != before.get(name, WAITING):
                self._observe(UpstreamJudged(self._space.model, name, judgement.standing, judgement.reason))

    def _precedence(self, name: str) -> tuple[bool, bool, bool]:
        """Return the order of judgement: the lead before others, and the canary last in any case.

        Upstreams of the first known member's kind come before: whichever is known first, the configuration
        decides whether a name is an embedding model or a reranker.
        """
        return name not in self.members, self._kind(name) != self._kind_wanted(), name != self.lead

    def _kind_wanted(self) -> Kind | None:
        return next((kind for name in self.members if (kind := self._kind(name)) is not None), None)

    def _kind(self, name: str) -> Kind | None:
        capabilities = self.judged[name].capabilities
        return None if capabilities is None else kind_of_model(capabilities)

    def _judgement(self, name: str, admitted: list[Facts]) -> Judgement:
        """Return the judgement of one upstream. admitted: those that serve the model, the lead first."""
        facts = self._facts(name)
        if facts is None or not (admitted or name in self.members):
            return WAITING
        if kind_of_model(facts.capabilities) == "embedding model":
            judgement = self._judgement_of_vectors(self.judged[name])
            if judgement.standing != "serving":
                return judgement
        if admitted and (reason := self._contradiction(name, facts, admitted)) is not None:
            return Judgement("refused", reason)
        if name not in self.members and self.canary is not None and self.canary.withdrawn:
            return Judgement("withdrawn", self.canary.withdrawn)
        return SERVING

    def _contradiction(self, name: str, facts: Facts, admitted: list[Facts]) -> str | None:
        if (reason := contradiction(admitted[0], facts)) is not None or name in self.members:
            return reason
        common = common_capabilities(admitted)
        return None if common is None else nothing_shared(common, facts.capabilities)

    def _judgement_of_vectors(self, upstream: JudgedUpstream) -> Judgement:
        fingerprint = upstream.checked_fingerprint
        if fingerprint is None:
            return Judgement("refused", MIXED_REPLICAS) if upstream.fingerprint == MIXED else WAITING
        if self._space.reference is None:
            return Judgement("waiting", NOT_AGREED)
        if not self._space.includes(fingerprint):
            return Judgement("refused", self._space.mismatch_reason(fingerprint))
        return SERVING

    def _facts(self, name: str) -> Facts | None:
        upstream, settings = self.judged[name], self._settings
        capabilities = upstream.capabilities
        if capabilities is None:
            return None
        prompts = {**capabilities.prompts, **upstream.settings.prompts, **settings.prompts}
        configured = Truncate(settings.truncate) if settings.truncate else None
        return Facts(
            upstream.settings.backend, capabilities, prompts, default_truncation(configured, capabilities)
        )


def _is_same(known: _Known, before: _Known) -> bool:
    return known[0] is before[0] and known[1] is before[1]


def nothing_shared(model: Capabilities, canary: Capabilities) -> str | None:
    """Return why a canary would get no call, None if it offers an operation of the model."""
    wanted = model.operations - FREE_OPERATIONS or model.operations
    if not wanted or wanted & canary.operations:
        return None
    return f"it offers nothing of what the model does: {', '.join(sorted(wanted))}"


def serves_alike(canary: Capabilities, model: Capabilities, call: Call) -> bool:
    """Return whether a canary offers what a call needs, by the same way as the model's other upstreams."""
    needed = call.work.operation
    if needed not in model.operations:
        needed = SERVED_BY.get(needed, needed)
    if needed not in canary.operations or not call.work.outputs_of(model) <= canary.outputs:
        return False
    if call.instruction is not None and model.takes_instruction and not canary.takes_instruction:
        return False
    return not call.work.joins_chunks or canary.late_chunking
