"""Roles of inputs, and the prompts that express them."""

from collections import ChainMap
from typing import get_args

import pytest

from backends.contract import Embed, Encode, Output, Tokenize
from gateway.prompts import NAMES, Role, prompt_of, with_prompt, with_roles

TEXTS = ("a", "b")


@pytest.mark.parametrize(
    ("role", "prompt_names", "name"),
    [
        ("query", ("query", "document"), "query"),
        ("query", ("search_document", "search_query"), "search_query"),
        ("query", ("passage", "query", "retrieval.query"), "query"),
        ("document", ("query", "passage"), "passage"),
        ("document", ("query",), None),
        ("classification", ("Classification", "STS"), "Classification"),
        ("clustering", (), None),
        ("similarity", ("STS",), "STS"),
        ("separation", ("separation", "clustering"), "separation"),
    ],
)
def test_the_first_prompt_name_that_a_model_knows_expresses_the_role(
    role: Role, prompt_names: tuple[str, ...], name: str | None
) -> None:
    assert name == prompt_of(role, prompt_names)


def test_every_role_has_names() -> None:
    assert set(get_args(Role)) == NAMES.keys()
    assert all(NAMES.values())


def test_a_configured_prompt_is_written_into_the_inputs_and_replaces_the_checkpoints() -> None:
    work = with_prompt(Embed(TEXTS), "query", ChainMap({"query": "q: "}), {"query": "other: "})

    assert Embed(("q: a", "q: b"), prompt_name="") == work


@pytest.mark.parametrize(
    "work", [Embed(TEXTS), Encode(TEXTS, frozenset({Output.SPARSE}))], ids=["embed", "encode"]
)
def test_a_prompt_of_the_checkpoint_is_passed_by_name(work: Embed | Encode) -> None:
    prompted = with_prompt(work, "document", ChainMap({"query": "q: "}), {"passage": "p: "})

    assert ("passage", TEXTS) == (prompted.prompt_name, prompted.inputs)


@pytest.mark.parametrize("role", [None, "query"])
def test_a_model_without_a_prompt_for_the_role_uses_its_default(role: Role | None) -> None:
    assert Embed(TEXTS) == with_prompt(Embed(TEXTS), role, ChainMap({"document": "d: "}), {})


def test_a_prompt_named_by_the_call_takes_precedence_over_its_role() -> None:
    prompts = ChainMap({"query": "q: ", "title": "t: "})

    assert ("t: a", "t: b") == with_prompt(Embed(TEXTS, prompt_name="title"), "query", prompts, {}).inputs
    assert ("t: a", "t: b") == with_prompt(Tokenize(TEXTS, prompt_name="title"), None, prompts, {}).inputs


def test_an_unknown_prompt_name_is_left_to_the_backend() -> None:
    work = Embed(TEXTS, prompt_name="nowhere")

    assert work == with_prompt(work, None, ChainMap({"query": "q: "}), {})


@pytest.mark.parametrize(
    ("prompts", "default", "inputs"),
    [
        ({"query": "q: ", "passage": "p: "}, None, ("q: a", "p: b", "p: c")),
        ({"query": "q: "}, None, ("q: a", "b", "c")),
        ({"query": "q: ", "usual": "u: "}, "usual", ("q: a", "u: b", "u: c")),
        ({"document": "d: ", "query": ""}, None, ("a", "d: b", "d: c")),
    ],
)
def test_a_rerank_by_cosine_gives_query_and_documents_their_prompts(
    prompts: dict[str, str], default: str | None, inputs: tuple[str, ...]
) -> None:
    work, roles = Embed(("a", "b", "c")), (True, False, False)

    assert Embed(inputs, prompt_name="") == with_roles(work, roles, ChainMap(prompts), default)


def test_a_rerank_by_a_model_without_roles_keeps_its_default_prompt() -> None:
    work = Embed(("a", "b"))

    assert work is with_roles(work, (True, False), ChainMap({"STS": "s: "}), "STS")


def test_a_name_of_the_configuration_takes_precedence_over_other_names_of_the_role() -> None:
    configured, checkpoint = ChainMap({}, {"query": "query: ", "passage": "passage: "}), {"document": ""}

    work = with_prompt(Embed(TEXTS), "document", configured, checkpoint)
    reranked = with_roles(Embed(TEXTS), (True, False), ChainMap(*configured.maps, checkpoint), None)

    assert work.inputs == ("passage: a", "passage: b")
    assert reranked.inputs == ("query: a", "passage: b")


def test_a_name_of_the_model_takes_precedence_over_those_of_its_upstream() -> None:
    configured = ChainMap({"passage": "model: "}, {"document": "upstream: "})

    assert with_prompt(Embed(TEXTS), "document", configured, {}).inputs == ("model: a", "model: b")
