"""Scoring template of a reranker: the prompt around a query and a document, and the tokens that answer it.

Pure. A prompt consists of pieces that are tokenized separately, because some models were trained that way: a
byte-level tokenizer joins "?" and a line break to one token within a piece, and not across two.

Published rerankers: their templates by family, the ids that name them, and those that cannot be served.

Pure. docs/engine-checkpoints.md shows the same families to users.
"""

import re
from pathlib import PurePath
from typing import Literal, TypeAlias

import msgspec

from backends.contract.errors import ModelUnavailable
from backends.recipe.options import RerankFamily, RerankPrompt

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


# Source: the model card of Qwen/Qwen3-Reranker-0.6B, "Transformers Usage".
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Source: class MxbaiRerankV2 of the package mxbai-rerank, which tokenizes each of these on its own.
_MXBAI_BEFORE = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
_MXBAI_QUERY = "query: {query}"
_MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
)
_MXBAI_AFTER = ("\n", "document: {document}", "\n", _MXBAI_TASK, "<|im_end|>\n<|im_start|>assistant\n")
# Source: class BaseLLMReranker of FlagEmbedding 1.3, which tokenizes each of these on its own after the BOS.
_BGE = ("A: {query}", "\n", "B: {document}", "\n", "{instruction}")
_BGE_INSTRUCTION = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'."
)
# Source: the model card of nvidia/llama-nemotron-rerank-1b-v2.
_NEMOTRON = "question:{query} \n \n passage:{document}"

FAMILIES: dict[RerankFamily, RerankTemplate] = {
    "qwen3": RerankTemplate(
        prompt_of(_QWEN3, instruction=_QWEN3_INSTRUCTION), open_prompt_of(_QWEN3), "yes", "no"
    ),
    "mxbai-v2": RerankTemplate(
        prompt_of(_MXBAI_BEFORE, _MXBAI_QUERY, *_MXBAI_AFTER),
        open_prompt_of(_MXBAI_BEFORE, "instruction: {instruction}\n" + _MXBAI_QUERY, *_MXBAI_AFTER),
        "1",
        "0",
    ),
    "bge-gemma": RerankTemplate(
        prompt_of(*_BGE, instruction=_BGE_INSTRUCTION), open_prompt_of(*_BGE), "Yes", special_tokens=True
    ),
    "nemotron": RerankTemplate(prompt_of(_NEMOTRON), special_tokens=True),
    "pair": RerankTemplate(),
}
PUBLISHED: dict[str, RerankFamily] = {
    **{f"Qwen/Qwen3-Reranker-{size}": "qwen3" for size in ("0.6B", "4B", "8B")},
    **{f"tomaarsen/Qwen3-Reranker-{size}-seq-cls": "qwen3" for size in ("0.6B", "4B", "8B")},
    "mixedbread-ai/mxbai-rerank-base-v2": "mxbai-v2",
    "mixedbread-ai/mxbai-rerank-large-v2": "mxbai-v2",
    "BAAI/bge-reranker-v2-gemma": "bge-gemma",
    "nvidia/llama-nemotron-rerank-1b-v2": "nemotron",
    "nvidia/llama-3.2-nv-rerankqa-1b-v2": "nemotron",
}
# Architectures whose own code does more than score one pair. `trust_remote_code` does not change that.
REFUSED: dict[str, str] = {
    "JinaForRanking": "it scores all documents of a query in one pass, and a call is served in several",
    "JinaVLForRanking": "it reads images as well as text; vLLM serves it",
    "LayerWiseMiniCPMForCausalLM": "it has a scoring head in each of its upper layers",
    "CostWiseGemmaForCausalLM": "it drops tokens between its layers and has a scoring head in several",
}


def published_family(model: str) -> RerankFamily | None:
    """Return the family of a hub id, or of a folder named as a published checkpoint; None if not known."""
    if not PurePath(model).is_absolute():
        return PUBLISHED.get(model)
    folder = PurePath(model).name
    return next((family for name, family in PUBLISHED.items() if name.endswith(f"/{folder}")), None)
