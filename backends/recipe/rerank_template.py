"""Scoring template of a reranker: the prompt around a query and a document, and the tokens that answer it.

Pure. A prompt consists of pieces that are tokenized separately, because some models were trained that way: a
byte-level tokenizer joins "?" and a line break to one token within a piece, and not across two.
"""

import re
from typing import Literal, TypeAlias

import msgspec

from backends.contract.errors import ModelUnavailable
from backends.recipe.options import RerankPrompt

Placeholder: TypeAlias = Literal["instruction", "query", "document"]
# Splits a text into literals, at even places, and placeholders, at odd places.
PLACEHOLDERS = re.compile(r"\{(instruction|query|document)\}")


class Piece(msgspec.Struct, frozen=True):
    """Text that is tokenized on its own. parts: literals at even places, placeholders at odd places."""

    parts: tuple[str, ...]

    @property
    def literals(self) -> tuple[str, ...]:
        """Texts around the placeholders."""
        return self.parts[::2]

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the placeholders, in order."""
        return self.parts[1::2]

    def fill(self, values: dict[str, str]) -> str:
        """Return the text with a value in each placeholder."""
        return "".join(values[part] if i % 2 else part for i, part in enumerate(self.parts))

    def span(self, placeholder: Placeholder, values: dict[str, str]) -> tuple[int, int]:
        """Return the first character of a value in the filled text, and the one after its last."""
        start = len(Piece(self.parts[: 1 + 2 * self.placeholders.index(placeholder)]).fill(values))
        return start, start + len(values[placeholder])


Prompt: TypeAlias = tuple[Piece, ...]


class RerankTemplate(msgspec.Struct, frozen=True):
    """Prompt of a reranker and the tokens whose logits are its score.

    prompt: of calls without an instruction; empty for the two texts as the tokenizer joins them. instructed:
    of calls with one; empty if the model takes none. positive, negative: next tokens that count for and
    against a document, by text or id. Without `positive` a classifier scores; without `negative` nothing is
    subtracted. special_tokens: the tokenizer's own surround the prompt. query_prefix: text before a query
    that has no prompt around it, and before a text that is classified.
    """

    prompt: Prompt = ()
    instructed: Prompt = ()
    positive: str | int | None = None
    negative: str | int | None = None
    special_tokens: bool = False
    query_prefix: str = ""


def prompt_of(*texts: str, instruction: str = "") -> Prompt:
    """Parse the pieces of a prompt, with a literal instruction in its placeholder."""
    return tuple(_bound(piece, instruction) for piece in open_prompt_of(*texts))


def open_prompt_of(*texts: str) -> Prompt:
    """Parse the pieces of a prompt, with a placeholder for the call's instruction."""
    return tuple(Piece(tuple(PLACEHOLDERS.split(text))) for text in texts)


def written_template(written: RerankPrompt) -> RerankTemplate:
    """Return the template that an operator wrote.

    Raises: ModelUnavailable if a placeholder is missing or appears twice.
    """
    placeholders = PLACEHOLDERS.findall(written.prompt)
    if (
        placeholders.count("query") != 1
        or placeholders.count("document") != 1
        or placeholders.count("instruction") > 1
    ):
        raise ModelUnavailable(
            "the prompt of `rerank_template` must contain {query} and {document} once, and {instruction} at "
            "most once"
        )
    if ("instruction" in placeholders) is not (written.instruction is not None):
        raise ModelUnavailable(
            "the prompt of `rerank_template` must contain {instruction} if `instruction` is set, and only "
            "then"
        )
    return RerankTemplate(
        prompt_of(written.prompt, instruction=written.instruction or ""),
        open_prompt_of(written.prompt) if written.instruction is not None else (),
        written.positive,
        written.negative,
        written.special_tokens,
    )


def split_at(rendered: str, marks: dict[str, Placeholder]) -> Prompt:
    """Return a rendered prompt as one piece with placeholders at marks; () unless each mark appears once."""
    if any(rendered.count(mark) != 1 for mark in marks):
        return ()
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", rendered)
    return (Piece(tuple(marks[part] if i % 2 else part for i, part in enumerate(parts))),)


def _bound(piece: Piece, instruction: str) -> Piece:
    """Return the piece with the instruction as a part of its literals."""
    parts = [piece.parts[0]]
    for placeholder, literal in zip(piece.placeholders, piece.literals[1:], strict=True):
        if placeholder == "instruction":
            parts[-1] += instruction + literal
        else:
            parts += [placeholder, literal]
    return Piece(tuple(parts))
