"""What inputs are for, and the prompt that says so to a model. Pure.

Dialects have words of their own for roles; checkpoints have names of their own for prompts. The first name
that a model knows is taken; a model without any of them takes all inputs alike.
"""

from collections.abc import Container, Mapping
from typing import Literal, TypeAlias

import msgspec

from backends.contract import Embed, Encode, Tokenize

Role: TypeAlias = Literal["query", "document", "classification", "clustering", "similarity", "separation"]
Promptable: TypeAlias = Embed | Encode | Tokenize

# Source: sentence-transformers (query, document, passage, corpus) and the checkpoints of nomic, jina, e5 and
# EmbeddingGemma, the most usual name first.
NAMES: dict[Role, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
    "similarity": ("text-matching", "similarity", "STS", "sts"),
    "separation": ("separation", "clustering", "Clustering"),
}


def prompt_of(role: Role, known: Container[str]) -> str | None:
    """The name of the prompt that says a role to a model that knows these; None where none does."""
    return next((name for name in NAMES[role] if name in known), None)


def with_prompt(
    work: Promptable, role: Role | None, written: Mapping[str, str], own: Mapping[str, str]
) -> Promptable:
    """The work with its prompt: by name where it is the model's own, in the inputs where the config has it.

    written: of the config, name → text; they go before the model's own of the same name. A prompt that the
    call names itself goes before its role.
    """
    name = work.prompt_name
    if name is None and role is not None:
        name = prompt_of(role, {*written, *own})
    if name is None or name not in written:
        return work if name == work.prompt_name else msgspec.structs.replace(work, prompt_name=name)
    inputs = tuple(written[name] + text for text in work.inputs)
    return msgspec.structs.replace(work, inputs=inputs, prompt_name="")


def with_roles(work: Embed, known: Mapping[str, str], default: str | None) -> Embed:
    """A rerank's texts, the query first, each with what says its role, written into it.

    known: all prompts of the model, name → text; default: the name of the one that goes before a text of a
    role for which there is none. The work as it is where no role has one.
    """
    names = prompt_of("query", known), prompt_of("document", known)
    if names == (None, None):
        return work
    to_query, to_document = (known.get(name or default or "", "") for name in names)
    query, *documents = work.inputs
    inputs = (to_query + query, *(to_document + one for one in documents))
    return msgspec.structs.replace(work, inputs=inputs, prompt_name="")
