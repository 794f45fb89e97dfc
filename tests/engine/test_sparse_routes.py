"""Routes of a checkpoint: queries whose terms are looked up, next to a network for documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from transformers import AutoTokenizer

from backends.contract import Embed, Encode, EncodeReply, Output, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable, UnsupportedWork
from backends.recipe.checkpoint import read_input_rules
from backends.recipe.options import TaskSettings
from tests.engine.engines import engine_on, load_tiny, run_work
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.sparse import FAMILIES, TABLE_FOLDER

FAMILY = next(family for family in FAMILIES if family.name == "opensearch-doc-v3")
SPARSE = frozenset({Output.SPARSE})
TABLE = "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding"
NETWORK = "sentence_transformers.sparse_encoder.models.MLMTransformer"
POOLING = "sentence_transformers.sparse_encoder.models.SpladePooling"


@pytest.fixture
def routed(tmp_path: Path) -> Path:
    return write_checkpoint(FAMILY, tmp_path / "routed")


def change_router(folder: Path, **keys: Any) -> None:
    path = folder / "router_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("truncate", "kept"), [(Truncate.RIGHT, slice(512)), (Truncate.LEFT, slice(-512, None))]
)
async def test_a_long_query_is_cut_without_special_tokens(
    truncate: Truncate, kept: slice, routed: Path
) -> None:
    model = load_tiny(routed)
    text = "a " * 300 + "yes " * 300
    table = load_file(routed / TABLE_FOLDER / "model.safetensors")["weight"].numpy()
    (ids,) = model.preparer.tokenizer.ids([text])

    reply = await run_work(
        engine_on(model), Encode((text,), SPARSE, prompt_name="query", truncate=truncate), EncodeReply
    )

    (terms,) = reply.sparse or ()
    np.testing.assert_array_equal(terms.indices, np.unique(ids[kept]))
    np.testing.assert_allclose(terms.values, table[terms.indices])
    assert (reply.truncated, reply.input_tokens) == ((0,), (512,))
    with pytest.raises(InvalidWork, match="512"):
        await engine_on(model).run(Encode((text,), SPARSE, prompt_name="query", truncate=Truncate.ERROR))


async def test_queries_give_term_weights_only(routed: Path) -> None:
    engine = engine_on(load_tiny(routed))

    with pytest.raises(UnsupportedWork, match="have no network"):
        await engine.run(Encode(("a",), frozenset({Output.TOKENS}), prompt_name="query"))
    assert await run_work(engine, Encode(("a",), frozenset({Output.TOKENS})), EncodeReply)


async def test_an_input_without_a_role_takes_the_default_route_or_is_refused(routed: Path) -> None:
    engine = engine_on(load_tiny(routed))
    document = await run_work(engine, Encode(("yes",), SPARSE, prompt_name="document"), EncodeReply)
    plain = await run_work(engine, Encode(("yes",), SPARSE), EncodeReply)
    assert document.sparse is not None
    assert plain.sparse is not None
    np.testing.assert_array_equal(document.sparse[0].values, plain.sparse[0].values)

    # A prompt from the configuration is part of the text, and the role is lost.
    with pytest.raises(InvalidWork, match="configure no `prompts`"):
        await engine.run(Encode(("yes",), SPARSE, prompt_name=""))
    change_router(routed, parameters={"default_route": None, "allow_empty_key": False})
    with pytest.raises(InvalidWork, match="name one of document, query"):
        await engine_on(load_tiny(routed)).run(Encode(("yes",), SPARSE))


@pytest.mark.parametrize(
    ("structure", "types", "refusal"),
    [
        ({"query": ["q"]}, {"q": TABLE}, "one network next to routes of SparseStaticEmbedding"),
        (
            {"query": ["", "p"], "document": ["", "p"]},
            {"": NETWORK, "p": POOLING},
            "routes query, document",
        ),
        ({"query": ["q"], "document": ["n", "p"]}, {"q": TABLE, "n": NETWORK, "p": POOLING}, "network in n"),
        ({"query": ["q"], "document": [""]}, {"q": "custom.Table", "": NETWORK}, "does not serve: custom"),
        ({"query": ["q"], "document": ["x"]}, {"q": TABLE}, "does not serve: x"),
        ({"query": ["../q"], "document": [""]}, {"../q": TABLE, "": NETWORK}, r"does not serve: \.\./q"),
    ],
)
def test_other_routes_are_refused(
    structure: dict[str, list[str]], types: dict[str, str], refusal: str, routed: Path
) -> None:
    change_router(routed, structure=structure, types=types)

    with pytest.raises(ModelUnavailable, match=refusal):
        load_tiny(routed)


def test_a_router_without_its_file_is_refused(routed: Path) -> None:
    (routed / "router_config.json").unlink()

    with pytest.raises(ModelUnavailable, match="states no routes for the module Router"):
        load_tiny(routed)


def test_lengths_and_prompts_of_any_router_are_read_for_other_servers(routed: Path) -> None:
    change_router(routed, structure={"query": [""], "document": [""]}, types={"": NETWORK})

    assert read_input_rules(routed).max_tokens == 512


def test_routes_by_modality_are_refused(routed: Path) -> None:
    change_router(routed, parameters={"route_mappings": {"('query', 'image')": "query"}})

    with pytest.raises(ModelUnavailable, match="route_mappings"):
        load_tiny(routed)


def test_settings_cannot_make_a_routed_model_dense(routed: Path) -> None:
    with pytest.raises(ModelUnavailable, match="`task` and `pooling` cannot change"):
        load_tiny(routed, settings=TaskSettings("embed"))


def test_a_table_of_another_vocabulary_is_refused(routed: Path) -> None:
    save_file({"weight": torch.ones(7)}, routed / TABLE_FOLDER / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"\[7\].*not a `weight` of"):
        load_tiny(routed)

    path = routed / TABLE_FOLDER / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ModelUnavailable, match="not the tokenizer of the network"):
        load_tiny(routed)


async def test_a_routed_model_gives_no_dense_vectors(routed: Path) -> None:
    with pytest.raises(UnsupportedWork):
        await engine_on(load_tiny(routed)).run(Embed(("a",)))


async def test_a_table_may_be_a_json_file_of_tokens(routed: Path) -> None:
    folder = routed / TABLE_FOLDER
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps({"frozen": True, "path": "weights/idf.json"}))
    with pytest.raises(
        ModelUnavailable, match=r"token weights, without them: put model.safetensors or idf.json"
    ):
        load_tiny(routed)

    (folder / "idf.json").write_text(json.dumps({"yes": 2.5, "a": 1, "[UNK]": 0.5}))
    reference = SparseStaticEmbedding.from_json(
        str(folder / "idf.json"), AutoTokenizer.from_pretrained(routed)
    ).weight.detach()
    model = load_tiny(routed)
    reply = await run_work(engine_on(model), Encode(("yes a yes",), SPARSE, prompt_name="query"), EncodeReply)
    (terms,) = reply.sparse or ()
    assert [1.0, 2.5] == sorted(terms.values.tolist())
    np.testing.assert_allclose(reference[terms.indices.tolist()].numpy(), terms.values)

    (folder / "idf.json").write_text(json.dumps({"no such token": 1.0}))
    with pytest.raises(ModelUnavailable, match="'no such token', which is no number, or of no token"):
        load_tiny(routed)
