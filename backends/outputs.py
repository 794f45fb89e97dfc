"""Several kinds of output from a wire that gives one kind a request. Pure.

Rule: an input's tokens are counted once, however often the wire reads it.
"""

from collections.abc import Sequence

import msgspec

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output, Reply
from backends.errors import ReplicaFailed, UnsupportedWork


def check_outputs(work: Encode, offered: frozenset[Output]) -> None:
    """Raises: UnsupportedWork where the model gives a kind of output that is asked for to nobody."""
    missing = sorted(work.outputs - offered)
    if missing:
        raise UnsupportedWork(f"this upstream's model gives no {missing[0]} output")


def split_outputs(work: Encode) -> list[Embed | Encode]:
    """The work as works of one kind of output each, dense first."""
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
    """The one kind that a part asks for."""
    (output,) = work.outputs
    return output


def merge_replies(replies: Sequence[Reply]) -> EncodeReply:
    """The replies to the parts of one work, as one.

    Raises: ReplicaFailed where a part was answered with something else.
    """
    whole = EncodeReply(0)
    for reply in replies:
        match reply:
            case EmbedReply():
                whole = msgspec.structs.replace(whole, dense=reply.vectors)
            case EncodeReply():
                whole = msgspec.structs.replace(
                    whole,
                    sparse=reply.sparse or whole.sparse,
                    multivector=reply.multivector or whole.multivector,
                    token_vectors=reply.token_vectors or whole.token_vectors,
                )
            case _:
                raise ReplicaFailed("the upstream answered to another work")
    tokens = max(reply.tokens for reply in replies)
    return msgspec.structs.replace(whole, tokens=tokens, truncated=_truncated(replies))


def _truncated(replies: Sequence[Reply]) -> tuple[int, ...] | None:
    """What any of them cut; unknown where one cannot tell."""
    cut: set[int] = set()
    for reply in replies:
        if reply.truncated is None:
            return None
        cut.update(reply.truncated)
    return tuple(sorted(cut))
