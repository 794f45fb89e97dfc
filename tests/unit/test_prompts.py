"""What inputs are for, and which prompt says so."""

from typing import get_args

import pytest

from backends.contract import Embed, Encode, Output, Tokenize
from gateway.prompts import NAMES, Role, prompt_of, with_prompt, with_roles

TEXTS = ("a", "b")


@pytest.mark.parametrize(
    ("role", "known", "name"),
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
def test_the_first_name_that_a_model_knows_says_the_role(
    role: Role, known: tuple[str, ...], name: str | None
) -> None:
    assert name == prompt_of(role, known)


def test_every_role_has_names() -> None:
    assert set(get_args(Role)) == NAMES.keys()
    assert all(NAMES.values())


def test_a_prompt_of_the_config_is_written_into_the_inputs_and_no_other_is_put_before() -> None:
    work = with_prompt(Embed(TEXTS), "query", {"query": "q: "}, {"query": "other: "})

    assert Embed(("q: a", "q: b"), prompt_name="") == work


@pytest.mark.parametrize(
    "work", [Embed(TEXTS), Encode(TEXTS, frozenset({Output.SPARSE}))], ids=["embed", "encode"]
)
def test_a_prompt_of_the_models_own_is_named(work: Embed | Encode) -> None:
    said = with_prompt(work, "document", {"query": "q: "}, {"passage": "p: "})

    assert ("passage", TEXTS) == (said.prompt_name, said.inputs)


@pytest.mark.parametrize("role", [None, "query"])
def test_a_model_without_such_a_prompt_takes_its_default(role: Role | None) -> None:
    assert Embed(TEXTS) == with_prompt(Embed(TEXTS), role, {"document": "d: "}, {})


def test_a_prompt_that_the_call_names_goes_before_its_role() -> None:
    prompts = {"query": "q: ", "title": "t: "}

    assert ("t: a", "t: b") == with_prompt(Embed(TEXTS, prompt_name="title"), "query", prompts, {}).inputs
    assert ("t: a", "t: b") == with_prompt(Tokenize(TEXTS, prompt_name="title"), None, prompts, {}).inputs


def test_a_name_that_nobody_knows_is_left_for_the_backend_to_judge() -> None:
    work = Embed(TEXTS, prompt_name="nowhere")

    assert work == with_prompt(work, None, {"query": "q: "}, {})


@pytest.mark.parametrize(
    ("known", "default", "inputs"),
    [
        ({"query": "q: ", "passage": "p: "}, None, ("q: a", "p: b", "p: c")),
        ({"query": "q: "}, None, ("q: a", "b", "c")),
        ({"query": "q: ", "usual": "u: "}, "usual", ("q: a", "u: b", "u: c")),
        ({"document": "d: ", "query": ""}, None, ("a", "d: b", "d: c")),
    ],
)
def test_a_rerank_by_cosine_says_what_is_query_and_what_document(
    known: dict[str, str], default: str | None, inputs: tuple[str, ...]
) -> None:
    assert Embed(inputs, prompt_name="") == with_roles(Embed(("a", "b", "c")), known, default)


def test_a_rerank_by_a_model_without_roles_takes_its_default() -> None:
    work = Embed(("a", "b"))

    assert work is with_roles(work, {"STS": "s: "}, "STS")
