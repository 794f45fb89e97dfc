"""Instructions of calls: their templates, and the refusals of models that take none."""

from collections import ChainMap
from typing import Any

import pytest

from backends.contract import Capabilities, Embed, Encode, Lengths, Operation, Output, Rerank, Score
from backends.instructions import PUBLISHED, instruction_prompt, template_in, template_problem
from gateway.api.wire.inputs import INSTRUCTION_BYTES_MAX, check_instruction
from gateway.calls import Call
from gateway.config.schema import UpstreamSettings
from gateway.errors import InvalidInput, NoReplica
from gateway.lane.slices import Bounds, cut
from gateway.prepare import InstructedModel, _build
from gateway.routing.offers import is_uniform, offers, union
from gateway.routing.routes import Route
from gateway.upstreams.model_inputs import ModelInputs

RETRIEVE = "Given a web search query, retrieve relevant passages that answer the query"
E5 = "Instruct: {instruction}\nQuery: {text}"


@pytest.mark.parametrize(
    ("prompts", "template"),
    [
        # Qwen3-Embedding, e5-mistral-7b-instruct, KaLM, bge-multilingual-gemma2, as they are published.
        ({"query": f"Instruct: {RETRIEVE}\nQuery:", "document": ""}, "Instruct: {instruction}\nQuery:{text}"),
        (
            {"web": f"Instruct: {RETRIEVE}\nQuery: ", "sts": "Instruct: Retrieve similar text.\nQuery: "},
            "Instruct: {instruction}\nQuery: {text}",
        ),
        ({"query": f"Instruct: {RETRIEVE} \n Query: "}, "Instruct: {instruction} \n Query: {text}"),
        ({"web": f"<instruct>{RETRIEVE}\n<query>"}, "<instruct>{instruction}\n<query>{text}"),
        # Two forms, and prompts that are no instructions.
        ({"a": "Instruct: x\nQuery: ", "b": "Instruct: x\nQuery:"}, None),
        ({"query": "query: ", "document": "passage: "}, None),
        ({"query": "task: search result | query: "}, None),
        ({"query": "Instruct: \nQuery: "}, None),
        ({"query": "Instruct: x Query: "}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_prompts_of_a_checkpoint_show_its_template(prompts: dict[str, str], template: str | None) -> None:
    assert template == template_in(prompts.values())


def test_a_checkpoints_template_renders_its_own_prompt() -> None:
    prompt = f"Instruct: {RETRIEVE}\nQuery:"
    template = template_in([prompt])

    assert template is not None
    assert prompt == instruction_prompt(template, RETRIEVE)
    assert "Instruct: {text}\nQuery:" == instruction_prompt(template, "{text}")


@pytest.mark.parametrize("template", PUBLISHED.values())
def test_published_templates_are_valid(template: str) -> None:
    assert template_problem(template) is None


@pytest.mark.parametrize(
    "template",
    ["", "{text}", "{instruction}", "{text}{instruction}", "{instruction} {text}.", "{instruction}" * 2],
)
def test_a_template_has_both_slots_once_and_ends_with_the_text(template: str) -> None:
    assert "{instruction}" in str(template_problem(template))


def model(**known: Any) -> InstructedModel:
    """Return an embedding model without a template, with these facts changed."""
    operations = known.pop("operations", frozenset({Operation.EMBED}))
    capabilities = Capabilities(known.pop("model_id", "own"), operations, **known.pop("capabilities", {}))
    facts: dict[str, Any] = {"template": None, "prompts": {}, "capabilities": capabilities}
    facts |= known
    return InstructedModel("m", **(facts | {"prompts": ChainMap(facts["prompts"])}))


@pytest.mark.parametrize(
    ("known", "prompt"),
    [
        ({"template": "{instruction}: {text}"}, "find: "),
        ({"prompts": {"q": "Instruct: x\nQuery:"}}, "Instruct: find\nQuery:"),
        ({"model_id": "intfloat/multilingual-e5-large-instruct"}, "Instruct: find\nQuery: "),
        # The configuration before the prompts, and these before the published table.
        ({"template": "{instruction}: {text}", "prompts": {"q": "Instruct: x\nQuery:"}}, "find: "),
        (
            {"prompts": {"q": "Instruct: x\nQuery:"}, "model_id": "intfloat/e5-mistral-7b-instruct"},
            "Instruct: find\nQuery:",
        ),
    ],
    ids=str,
)
def test_the_template_is_configured_or_the_checkpoints_or_published(
    known: dict[str, Any], prompt: str
) -> None:
    assert prompt == model(**known).query_prompt("find")


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"prompts": {"query": "query: "}},
        {"template": E5, "operations": frozenset({Operation.ENCODE, Operation.RERANK})},
    ],
    ids=str,
)
def test_a_model_without_a_place_for_an_instruction_refuses_it(known: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="`instruction`") as refusal:
        model(**known).query_prompt("find")
    assert "instruction" == refusal.value.param


def test_without_a_replica_no_template_is_assumed() -> None:
    with pytest.raises(NoReplica):
        InstructedModel("m", E5, ChainMap(), None).query_prompt("find")


def test_an_empty_instruction_is_none_and_a_long_one_an_error() -> None:
    longest = "ä" * (INSTRUCTION_BYTES_MAX // 2)

    assert check_instruction(None) is None
    assert check_instruction("") is None
    assert longest == check_instruction(longest)
    with pytest.raises(InvalidInput, match=str(INSTRUCTION_BYTES_MAX)):
        check_instruction(longest + "a")


@pytest.mark.parametrize(
    "work", [Rerank("q", ("a", "b")), Score((("q", "a"), ("q", "b")))], ids=["rerank", "score"]
)
def test_an_instruction_counts_in_the_tokens_and_bytes_of_every_pair(work: Rerank | Score) -> None:
    instructed = type(work)(
        **{field: getattr(work, field) for field in work.__struct_fields__} | {"instruction": "find"}
    )

    plain_tokens = work.token_bounds(Lengths())
    assert [tokens + 4 for tokens in plain_tokens] == instructed.token_bounds(Lengths())
    assert work.request_bytes + len('"find"') == instructed.request_bytes
    # A body that holds both pairs holds only one of them next to the instruction.
    bounds = Bounds(bytes=work.request_bytes)
    assert (1, 2) == (len(cut(work, [1, 1], bounds)), len(cut(instructed, [1, 1], bounds)))
    assert all("find" == piece.work.instruction for piece in cut(instructed, [1, 1], bounds))


def test_only_replicas_that_take_an_instruction_are_offered_one() -> None:
    operations = frozenset({Operation.RERANK})
    plain, instructed = Capabilities("m", operations), Capabilities("m", operations, takes_instruction=True)
    work = Rerank("q", ("a",), instruction="find")

    assert (True, False) == (offers(instructed, work), offers(plain, work))
    assert offers(plain, Rerank("q", ("a",)))
    assert not is_uniform([plain, instructed])
    combined = union([plain, instructed])
    assert combined is not None
    assert combined.takes_instruction


def test_an_instruction_that_is_the_whole_prompt_is_for_documents_too() -> None:
    unpooled = {"model_id": "hkunlp/instructor-xl", "capabilities": {"pools_prompt": False}}

    assert "Represent: " == model(**unpooled).query_prompt("Represent: ")
    model(**unpooled).check_role("document")
    # A server that pools the prompt would return other vectors.
    with pytest.raises(InvalidInput):
        model(model_id="hkunlp/instructor-xl").query_prompt("Represent: ")
    with pytest.raises(InvalidInput, match="documents"):
        model(template=E5).check_role("document")


@pytest.mark.parametrize("pools_prompt", [True, False])
@pytest.mark.parametrize(
    ("call", "inputs", "lengths"),
    [
        (Call(Embed(("a", "b")), role="query"), ("q: a", "q: b"), (3, 3)),
        (Call(Embed(("a",)), role="query", instruction="find"), ("find: a",), (6,)),
        (Call(Encode(("a",), frozenset({Output.SPARSE})), instruction="find"), ("find: a",), (6,)),
        (Call(Rerank("a", ("b",))), ("q: a", "doc: b"), (3, 5)),
        (Call(Rerank("a", ("b",)), instruction="find"), ("find: a", "doc: b"), (6, 5)),
        (Call(Embed(("a",))), ("a",), ()),
    ],
    ids=str,
)
def test_a_model_that_pools_no_prompts_gets_their_lengths(
    call: Call, inputs: tuple[str, ...], lengths: tuple[int, ...], *, pools_prompt: bool
) -> None:
    settings = UpstreamSettings(
        backend="torch",
        model="m",
        prompts={"query": "q: ", "document": "doc: "},
        instruction_template="{instruction}: {text}",
    )
    capabilities = Capabilities("m", frozenset({Operation.EMBED}), pools_prompt=pools_prompt)
    route = Route("m", "u", Operation.EMBED, None, 5.0)

    work = _build(ModelInputs(settings, lambda: capabilities), call, route).work

    assert isinstance(work, Embed | Encode)
    assert (inputs, () if pools_prompt else lengths) == (work.inputs, work.prompt_characters)
