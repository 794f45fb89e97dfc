"""Roles of inputs, and the prompts that express them to a model. Pure.

Each dialect has its own words for roles, and each checkpoint its own names for prompts. Prompts come from the
configuration of a model, from that of its upstream and from its checkpoint. The first of these that knows a
name of the role decides, by the first name that it knows; a model without any treats all inputs the same.
"""

from collections import ChainMap
from collections.abc import Container, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import msgspec

from backends.contract import BaseWork

Role: TypeAlias = Literal["query", "document", "classification", "clustering", "similarity", "separation"]
PromptableT = TypeVar("PromptableT", bound=BaseWork)
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
IS_QUERY: dict[Role, bool] = {"query": True, "document": False}


def prompt_of(role: Role, *sources: Container[str]) -> str | None:
    """Return the model's prompt name for a role, None if it has none.

    sources: names of prompts, those that take precedence first.
    """
    return next((name for names in sources for name in NAMES[role] if name in names), None)


def with_prompt(
    work: PromptableT, role: Role | None, configured: Prompts, checkpoint: Mapping[str, str]
) -> PromptableT:
    """Return the work with its prompt: by name if the checkpoint has it, in the inputs if the config has it.

    configured: of the configuration. checkpoint: prompts by name. A prompt that the call names takes
    precedence over its role.
    """
    if not work.takes_prompt:
        return work
    name = work.prompt_name
    if name is None and role is not None:
        name = prompt_of(role, *configured.maps, checkpoint)
    if name is not None and name in configured:
        return work.with_prompt(configured[name])
    return work if name == work.prompt_name else msgspec.structs.replace(work, prompt_name=name)


def with_roles(
    work: PromptableT,
    roles: Sequence[bool],
    prompts: Prompts,
    default: str | None,
    instructed: str | None = None,
) -> PromptableT:
    """Return the work with the prompt of each input's role written into it.

    roles: of each input, whether it is a query. prompts: all prompts of the model. default: name of the
    prompt for a role that has none of its own. instructed: prompt that the call brings for its queries.
    Without it, a model that has prompts for neither role gets the work unchanged.
    """
    names = {is_query: prompt_of(role, *prompts.maps) for role, is_query in IS_QUERY.items()}
    if instructed is None and names == {True: None, False: None}:
        return work
    texts = {is_query: prompts.get(name or default or "", "") for is_query, name in names.items()}
    if instructed is not None:
        texts[True] = instructed
    return work.with_prompts([texts[is_query] for is_query in roles])
