"""Offers of models: of several replicas as one upstream, and of several upstreams as one model. Pure.

Replicas of one upstream add up: the upstream offers what any of them does (`union`), and a call goes to a
replica that offers it. Upstreams of one model do not: any of them may get any call, so that the model offers
what all of them do (`common_capabilities`), and two that would answer one call differently cannot share it
(`contradiction`). Both are computed when a replica changes, and not per call.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from backends.contract import (
    BackendKind,
    Capabilities,
    Operation,
    Truncate,
    Work,
)
from backends.kinds import KINDS

Value = TypeVar("Value")
Kind = Literal["embedding model", "reranker", "classifier", "tokenizer"]
VECTORS = frozenset({Operation.EMBED, Operation.EMBED_IMAGE, Operation.EMBED_AUDIO, Operation.ENCODE})


def offers(capabilities: Capabilities | None, work: Work) -> bool:
    """Return whether a replica with these capabilities offers the work: operation, outputs and options."""
    return capabilities is not None and work.is_offered_by(capabilities)


def union(reported: Sequence[Capabilities]) -> Capabilities | None:
    """Return the capabilities of a model, None without any replica; the first replica's take precedence."""
    if not reported:
        return None
    first, *others = reported
    if all(_is_covered(other, first) for other in others):
        return first
    return msgspec.structs.replace(
        first,
        operations=frozenset[str]().union(*(each.operations for each in reported)),
        outputs=frozenset[str]().union(*(each.outputs for each in reported)),
        max_input_tokens=min(_known([each.max_input_tokens for each in reported]), default=None),
        overhead_tokens=max(each.overhead_tokens for each in reported),
        takes_instruction=any(each.takes_instruction for each in reported),
        late_chunking=any(each.late_chunking for each in reported),
        dimensions=next(iter(_known([each.dimensions for each in reported])), None),
        score_kind=next(iter(_known([each.score_kind for each in reported])), None),
        labels=next((each.labels for each in reported if each.labels), ()),
    )


def is_uniform(reported: Sequence[Capabilities]) -> bool:
    """Return whether all replicas offer the same operations, outputs and options."""
    offered = {
        (each.operations, each.outputs, each.takes_instruction, each.late_chunking) for each in reported
    }
    return len(offered) < 2


def _is_covered(other: Capabilities, first: Capabilities) -> bool:
    if other.takes_instruction and not first.takes_instruction:
        return False
    if other.late_chunking and not first.late_chunking:
        return False
    return other.operations <= first.operations and other.outputs <= first.outputs


def _known(values: Sequence[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


class Facts(msgspec.Struct, frozen=True):
    """Offer of one upstream of a model, with its configuration.

    prompts: the texts that its inputs may get, by name: the configuration's and the checkpoint's. truncate:
    how it cuts inputs that are too long if a call does not say it.
    """

    backend: BackendKind
    capabilities: Capabilities
    prompts: Mapping[str, str]
    truncate: Truncate


def kind_of_model(capabilities: Capabilities) -> Kind:
    """Return the kind of model, of which upstreams behind one name must be."""
    operations = capabilities.operations
    if operations & VECTORS:
        return "embedding model"
    if Operation.RERANK in operations:
        return "reranker"
    return "classifier" if Operation.CLASSIFY in operations else "tokenizer"


def contradiction(first: Facts, other: Facts) -> str | None:
    """Return why one upstream cannot share a model with the first one, None if it can."""
    ours, theirs = first.capabilities, other.capabilities
    kind, other_kind = kind_of_model(ours), kind_of_model(theirs)
    if kind != other_kind:
        return f"it is a {other_kind}, and the model's other upstreams are {kind}s"
    if kind == "classifier" and ours.labels != theirs.labels:
        return f"its labels are not the model's: {', '.join(theirs.labels[:8]) or 'none are known'}"
    if kind == "reranker" and ours.score_kind != theirs.score_kind:
        return f"the scale of its scores is {theirs.score_kind or 'unknown'}, the model's {ours.score_kind}"
    return _prompt_contradiction(first, other) or _length_contradiction(first, other)


def common_capabilities(admitted: Sequence[Facts], canary: Facts | None = None) -> Capabilities | None:
    """Return what all upstreams of a model offer; None without any.

    canary: lowers the lengths, and nothing else: it gets only calls that it can serve.
    """
    if not admitted:
        return None
    all_of = [facts.capabilities for facts in admitted]
    first = all_of[0]
    if len(all_of) == 1 and canary is None:
        return first
    measured = all_of if canary is None else [*all_of, canary.capabilities]
    return msgspec.structs.replace(
        first,
        operations=first.operations.intersection(*(each.operations for each in all_of)),
        outputs=first.outputs.intersection(*(each.outputs for each in all_of)),
        max_input_tokens=min(_known([each.max_input_tokens for each in measured]), default=None),
        request_tokens=min(_known([each.request_tokens for each in measured]), default=None),
        overhead_tokens=max(each.overhead_tokens for each in measured),
        takes_instruction=all(each.takes_instruction for each in all_of),
        late_chunking=all(each.late_chunking for each in all_of),
    )


def _prompt_contradiction(first: Facts, other: Facts) -> str | None:
    """Return why two embedding models would embed different texts for one input."""
    if kind_of_model(first.capabilities) != "embedding model":
        return None
    if first.capabilities.typed_inputs != other.capabilities.typed_inputs:
        return "one upstream takes the type of an input, and the other its prompt: queries would differ"
    names = sorted(
        name
        for name in {*first.prompts, *other.prompts}
        if first.prompts.get(name, "") != other.prompts.get(name, "")
    )
    if names:
        return (
            f"its prompts differ from the model's: {', '.join(names[:8])}; set them in `prompts` of the model"
        )
    if _default_prompt(first) != _default_prompt(other):
        return "the prompt that it uses by default is not the model's"
    return None


def _default_prompt(facts: Facts) -> str:
    name = facts.capabilities.default_prompt
    return facts.prompts.get(name, "") if name else ""


def _length_contradiction(first: Facts, other: Facts) -> str | None:
    """Return why an input that is too long would not be treated alike."""
    if first.truncate != other.truncate:
        return (
            "it treats inputs that are too long differently: "
            f"{other.truncate}, not {first.truncate}; set `truncate` of the model"
        )
    ours, theirs = first.capabilities.max_input_tokens, other.capabilities.max_input_tokens
    if ours is None or theirs is None or ours == theirs:
        return None
    longer = first if ours > theirs else other
    if KINDS[longer.backend].cuts_inputs:
        return None
    return (
        f"its inputs have at most {theirs} tokens, those of the model's first upstream {ours}, and the "
        f"{longer.backend} server cannot cut at fewer than its own: a long text would have two vectors"
    )
