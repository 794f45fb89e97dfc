"""Roles of inputs, and the prompts that express them."""

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
    work = with_prompt(Embed(TEXTS), "query", {"query": "q: "}, {"query": "other: "})

    assert Embed(("q: a", "q: b"), prompt_name="") == work


@pytest.mark.parametrize(
    "work", [Embed(TEXTS), Encode(TEXTS, frozenset({Output.SPARSE}))], ids=["embed", "encode"]
)
def test_a_prompt_of_the_checkpoint_is_passed_by_name(work: Embed | Encode) -> None:
    prompted = with_prompt(work, "document", {"query": "q: "}, {"passage": "p: "})

    assert ("passage", TEXTS) == (prompted.prompt_name, prompted.inputs)


@pytest.mark.parametrize("role", [None, "query"])
def test_a_model_without_a_prompt_for_the_role_uses_its_default(role: Role | None) -> None:
    assert Embed(TEXTS) == with_prompt(Embed(TEXTS), role, {"document": "d: "}, {})


def test_a_prompt_named_by_the_call_takes_precedence_over_its_role() -> None:
    prompts = {"query": "q: ", "title": "t: "}

    assert ("t: a", "t: b") == with_prompt(Embed(TEXTS, prompt_name="title"), "query", prompts, {}).inputs
    assert ("t: a", "t: b") == with_prompt(Tokenize(TEXTS, prompt_name="title"), None, prompts, {}).inputs


def test_an_unknown_prompt_name_is_left_to_the_backend() -> None:
    work = Embed(TEXTS, prompt_name="nowhere")

    assert work == with_prompt(work, None, {"query": "q: "}, {})


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
    assert Embed(inputs, prompt_name="") == with_roles(Embed(("a", "b", "c")), prompts, default)


def test_a_rerank_by_a_model_without_roles_keeps_its_default_prompt() -> None:
    work = Embed(("a", "b"))

    assert work is with_roles(work, {"STS": "s: "}, "STS")
