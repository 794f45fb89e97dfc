"""Roles of inputs, and the prompts that express them to a model. Pure.

Each dialect has its own words for roles, and each checkpoint its own names for prompts. Prompts come from the
configuration of a model, from that of its upstream and from its checkpoint. The first of these that knows a
name of the role decides, by the first name that it knows; a model without any treats all inputs the same.
"""

from collections import ChainMap
from collections.abc import Container, Mapping
from typing import Literal, TypeAlias

import msgspec

from backends.contract import Embed, Encode, Tokenize, with_prefix

Role: TypeAlias = Literal["query", "document", "classification", "clustering", "similarity", "separation"]
Promptable: TypeAlias = Embed | Encode | Tokenize
# Prompts by name; each map is one source, those that take precedence first.
Prompts: TypeAlias = ChainMap[str, str]

# Source: sentence-transformers (query, document, passage, corpus) and the checkpoints of nomic, jina, e5 and
# EmbeddingGemma, the most common name first.
NAMES: dict[Role, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
    "similarity": ("text-matching", "similarity", "STS", "sts"),
    "separation": ("separation", "clustering", "Clustering"),
}


def prompt_of(role: Role, *sources: Container[str]) -> str | None:
    """Return the model's prompt name for a role, None if it has none.

    sources: names of prompts, those that take precedence first.
    """
    return next((name for names in sources for name in NAMES[role] if name in names), None)


def with_prompt(
    work: Promptable, role: Role | None, configured: Prompts, checkpoint: Mapping[str, str]
) -> Promptable:
    """Return the work with its prompt: by name if the checkpoint has it, in the inputs if the config has it.

    configured: of the configuration. checkpoint: prompts by name. A prompt that the call names takes
    precedence over its role.
    """
    name = work.prompt_name
    if name is None and role is not None:
        name = prompt_of(role, *configured.maps, checkpoint)
    if name is None or name not in configured:
        return work if name == work.prompt_name else msgspec.structs.replace(work, prompt_name=name)
    inputs = with_prefix(work, configured[name])
    return msgspec.structs.replace(work, inputs=inputs, prompt_name="")


def with_prompt_lengths(work: Promptable, plain: Promptable) -> Promptable:
    """Return the work with the lengths of the prompts that were written into its inputs.

    plain: the same work without prompts.
    """
    if isinstance(work, Tokenize) or work.inputs == plain.inputs:
        return work
    pairs = zip(work.inputs, plain.inputs, strict=True)
    lengths = tuple(len(prompted) - len(text) for prompted, text in pairs)
    return msgspec.structs.replace(work, prompt_characters=lengths)


def role_prompts(prompts: Prompts, default: str | None) -> tuple[str, str] | None:
    """Return the prompts of queries and of documents, None if a model has neither.

    prompts: all prompts of the model. default: name of the prompt for a role that has none of its own.
    """
    names = prompt_of("query", *prompts.maps), prompt_of("document", *prompts.maps)
    return None if names == (None, None) else _texts_of(names, prompts, default)


def _texts_of(names: tuple[str | None, str | None], prompts: Prompts, default: str | None) -> tuple[str, str]:
    query, document = (prompts.get(name or default or "", "") for name in names)
    return query, document


def with_roles(work: Embed, prompts: Prompts, default: str | None, instructed: str | None = None) -> Embed:
    """Return a rerank's texts, the query first, each with the prompt of its role written into it.

    prompts: all prompts of the model. default: name of the prompt for a role that has none of its
    own. instructed: prompt that the call brings for its query. Without it, a model that has prompts for
    neither role gets the work unchanged.
    """
    found = role_prompts(prompts, default)
    if found is None and instructed is None:
        return work
    query_prompt, document_prompt = found or _texts_of((None, None), prompts, default)
    query_prompt = query_prompt if instructed is None else instructed
    query, *documents = work.inputs
    inputs = (query_prompt + query, *(document_prompt + document for document in documents))
    return msgspec.structs.replace(work, inputs=inputs, prompt_name="")
