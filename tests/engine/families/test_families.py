"""Families of checkpoints: served as their own libraries compute them, or refused with the reason."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.checkpoints.small_files import network_folder
from backends.contract import EmbedReply, EncodeReply, Reply, RerankReply, Truncate, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.checkpoint import read_recipe
from backends.recipe.options import DTypeName
from backends.tokens.tokenizer import open_tokenizer
from backends.torch import wire
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.engines import cosines, dense_of, engine_on
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.family import Answer, Family, Served
from tests.engine.families.page import PAGE, models_page
from tests.engine.families.references import TEXTS, auto_tokenizer_ids
from tests.engine.families.table import FAMILIES

SERVED = [family for family in FAMILIES if isinstance(family.state, Served)]
NOT_SERVED = [family for family in FAMILIES if not isinstance(family.state, Served)]
# Least cosine of vectors, and most difference of scores, for each number format.
LEAST_COSINE: dict[DTypeName, float] = {"float32": 0.99999, "bfloat16": 0.9995}
NEEDS_GPU = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = ("cpu", pytest.param("cuda", marks=NEEDS_GPU))
SCORE_TOLERANCE: dict[DTypeName, float] = {"float32": 1e-4, "bfloat16": 0.02}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def checkpoint_of(name: str, folders: Path) -> Path:
    family = next(family for family in FAMILIES if family.name == name)
    return write_checkpoint(family, folders / name)


@cache
def expected_answers(name: str, folders: Path) -> Sequence[Answer]:
    family = next(family for family in FAMILIES if family.name == name)
    assert family.reference is not None
    return family.reference(checkpoint_of(name, folders))


def load_family(family: Family, folder: Path, dtype: DTypeName, device: str = "cpu") -> LoadedModel:
    return load(folder, "tiny", LoadOptions(dtype, device, settings=family.settings, **family.options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
async def test_a_served_family_computes_what_its_library_computes(
    family: Family, dtype: DTypeName, device: str, folders: Path
) -> None:
    assert isinstance(family.state, Served)
    if family.kind in {"dual", "pages"}:
        library = "soxr" if "sound" in family.notes else "PIL"
        pytest.importorskip(library, reason="images and sound need the extra `media`")
    model = load_family(family, checkpoint_of(family.name, folders), dtype, device)
    engine = engine_on(model)

    assert (family.kind, family.state.packed) == (model.recipe.kind, model.packed)
    for work, expected in expected_answers(family.name, folders):
        assert_alike(await engine.run(work), expected, dtype)


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_a_served_family_has_the_token_ids_of_its_library(family: Family, folders: Path) -> None:
    folder = network_folder(checkpoint_of(family.name, folders))
    texts = [*TEXTS, "word " * 600]
    max_tokens = read_recipe(folder, family.settings).max_tokens
    reference = family.token_ids or auto_tokenizer_ids

    ids = open_tokenizer(folder, max_tokens).encode(texts, Truncate.RIGHT).ids

    assert reference(folder, texts, max_tokens) == ids


@pytest.mark.parametrize("family", NOT_SERVED, ids=lambda family: family.name)
def test_any_other_family_is_refused_with_its_reason(family: Family, folders: Path) -> None:
    assert not isinstance(family.state, Served)

    with pytest.raises(ModelUnavailable, match=family.state.refusal):
        load_family(family, checkpoint_of(family.name, folders), "float32")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_inspection_without_weights_agrees_with_the_load(family: Family, folders: Path) -> None:
    folder = checkpoint_of(family.name, folders)

    found = inspect_folder(boot_of(family, folder), folder)

    if isinstance(family.state, Served):
        assert (family.kind, family.state.packed, None) == (found.kind, found.packed, found.refusal)
        assert found.weights.elements
    else:
        assert re.search(family.state.refusal, found.refusal or "")


def boot_of(family: Family, folder: Path) -> wire.ModelBoot:
    settings = family.settings
    return wire.ModelBoot(
        "tiny",
        settings.model or str(folder),
        dtype="float32",
        device="cpu",
        task=settings.task,
        pooling=settings.pooling,
        rerank_template=settings.rerank_template,
        adapter=settings.adapter,
        **family.options,
    )


def test_names_and_checkpoints_are_unique() -> None:
    names = [family.name for family in FAMILIES]
    checkpoints = [checkpoint for family in FAMILIES for checkpoint in family.checkpoints]

    assert len(names) == len(set(names))
    assert len(checkpoints) == len(set(checkpoints))
    assert len(checkpoints) >= 60


def assert_alike(reply: Reply, expected: Vectors, dtype: DTypeName) -> None:
    if isinstance(reply, RerankReply):
        np.testing.assert_allclose(reply.scores, expected, atol=SCORE_TOLERANCE[dtype], rtol=0)
        assert expected.std() > 0.01
        return
    rows = rows_of(reply, expected.shape[-1])
    assert expected.shape == rows.shape
    assert cosines(rows, expected).min() >= LEAST_COSINE[dtype]
    # Vectors that all point in one direction would agree after any computation.
    assert cosines(expected[:1], expected[1:]).min() < 0.99


def rows_of(reply: Reply, width: int) -> Vectors:
    """Return the vectors of a reply, or its weights of terms in vectors of this width."""
    if isinstance(reply, EmbedReply):
        return reply.vectors
    assert isinstance(reply, EncodeReply)
    if reply.sparse is not None:
        return np.stack([dense_of(terms, width) for terms in reply.sparse])
    return np.concatenate(reply.multivector or ())


def test_the_page_of_models_is_the_table() -> None:
    assert models_page() == PAGE.read_text(encoding="utf-8"), "run `make models`"
