"""Offer of a canary next to its model: it gets only calls that it can serve as the model does. Pure."""

from backends.contract import Capabilities, Operation
from gateway.calls import Call

TOKENIZING = frozenset({Operation.TOKENIZE, Operation.DETOKENIZE})
# Operations that another one serves, with scores by cosine.
SERVED_BY = {Operation.RERANK: Operation.EMBED, Operation.RERANK_IMAGE: Operation.EMBED_IMAGE}


def nothing_shared(model: Capabilities, canary: Capabilities) -> str | None:
    """Return why a canary would get no call, None if it offers an operation of the model."""
    wanted = model.operations - TOKENIZING or model.operations
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
    return not call.work.is_indivisible or canary.late_chunking
