"""Checks of the options that a wire or a model may lack. All raise UnsupportedWork."""

from backends.contract.errors import UnsupportedWork
from backends.contract.work import BaseWork


def check_no_instruction(work: BaseWork) -> None:
    """Check that a request for scores brings no instruction, for wires and models that take none."""
    if work.instruction is not None:
        raise UnsupportedWork("this upstream's model takes no instruction")


def check_no_max_tokens(work: BaseWork) -> None:
    """Check that a request does not state its own length, for wires that cut at the model's length only."""
    if work.max_tokens is not None:
        raise UnsupportedWork(
            f"this upstream cuts inputs at its model's length only, not at {work.max_tokens} tokens; "
            "send shorter texts"
        )


def check_plain_texts(work: BaseWork, server: str) -> None:
    """Check that a request has neither conversations nor texts without special tokens.

    server: name of the wire that has neither.
    """
    if work.is_plain:
        return
    if work.conversation is not None:
        raise UnsupportedWork(
            f"`messages` needs a chat template, which vLLM and the built-in engine apply; {server} reads "
            "texts: send `input`"
        )
    raise UnsupportedWork(
        f"`add_special_tokens: false` needs vLLM or the built-in engine; {server} always adds them: "
        "leave it out"
    )


def refused_chunks() -> UnsupportedWork:
    """Return the error of a wire that has no vectors of chunks in their document for a request for them."""
    return UnsupportedWork("this upstream's wire has no late chunking")


def refused_pairs() -> UnsupportedWork:
    """Return the error of a wire or model that scores texts only for pairs with images."""
    return UnsupportedWork("this upstream scores pairs of texts only, none with images")


def refused_parts() -> UnsupportedWork:
    """Return the error of a wire that carries text only for a request with images or sound."""
    return UnsupportedWork("this upstream reads text only, neither images nor sound")
