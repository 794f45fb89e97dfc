"""Encoders of pages: queries and pages in any batch, refusals, and scores between the two."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from backends.contract import EmbedParts, Encode, EncodeReply, Operation, Output, PatchGrid, Rerank, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable, UnsupportedWork
from backends.contract.vectors import max_similarity
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import describe, load
from backends.torch.passes.engine import Engine
from tests.engine.engines import engine_on, load_tiny, run_work
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.pages import FAMILIES, QUERY_LENGTH

pytest.importorskip("PIL", reason="pictures need the extra `media`")

from backends.torch.media.features import patch_grid
from tests.pictures import encoded, noise, part_of

NAMES = [family.name for family in FAMILIES]
MULTIVECTOR = frozenset({Output.MULTIVECTOR})
PAGES = tuple((part_of(encoded(noise(*size, seed))),) for seed, size in enumerate([(90, 60), (60, 90)] * 3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {family.name: write_checkpoint(family, folder / family.name) for family in FAMILIES}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, Engine]:
    return {name: engine_on(load_tiny(folder)) for name, folder in folders.items()}


def run(engine: Engine, work: EmbedParts | Encode) -> EncodeReply:
    return asyncio.run(run_work(engine, work, EncodeReply))


@pytest.mark.parametrize("name", NAMES)
def test_queries_and_pages_have_the_same_vectors_alone_and_together(
    name: str, engines: dict[str, Engine]
) -> None:
    inputs = (("what is the sum?",), *PAGES, ("a",))
    together = run(engines[name], EmbedParts(inputs, Output.MULTIVECTOR))
    alone = [run(engines[name], EmbedParts((item,), Output.MULTIVECTOR)) for item in inputs]
    query = run(engines[name], Encode(("what is the sum?",), MULTIVECTOR))

    assert together.multivector is not None
    assert query.multivector is not None
    for found, single in zip(together.multivector, alone, strict=True):
        assert single.multivector is not None
        np.testing.assert_allclose(found, single.multivector[0], atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(query.multivector[0], together.multivector[0], atol=1e-5)
    assert together.input_tokens == tuple(len(found) for found in together.multivector)


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_scored_by_the_best_patch_of_each_token(name: str, engines: dict[str, Engine]) -> None:
    found = run(engines[name], EmbedParts((("the sum",), *PAGES[:2]), Output.MULTIVECTOR)).multivector
    assert found is not None
    query, *pages = found

    scores = max_similarity(query, pages)

    expected = [(query @ page.T).max(axis=1).sum() for page in pages]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "rows", "columns"), [("colpali", (28, 28), 2, 2), ("colqwen2", (112, 84), 3, 4)]
)
def test_patches_of_a_page_are_where_its_grid_says(
    name: str, size: tuple[int, int], rows: int, columns: int, engines: dict[str, Engine]
) -> None:
    side = size[0] // columns
    pages = [noise(*size, 1)]
    for place in range(rows * columns):
        left, top = place % columns * side, place // columns * side
        changed = pages[0].copy()
        changed.paste((255, 255, 255), (left, top, left + side, top + side))
        pages.append(changed)
    inputs = (("the sum",), *((part_of(encoded(page)),) for page in pages))
    reply = run(engines[name], EmbedParts(inputs, Output.MULTIVECTOR))

    assert reply.multivector is not None
    assert reply.grids is not None
    of_text, grid, *others = reply.grids
    assert of_text is None
    assert grid is not None
    assert (rows, columns) == (grid.rows, grid.columns)
    assert {grid} == set(others)
    original, *patches = [page[grid.first :][: rows * columns] for page in reply.multivector[1:]]
    most_changed = [int(np.linalg.norm(found - original, axis=1).argmax()) for found in patches]
    assert list(range(rows * columns)) == most_changed


@pytest.mark.parametrize(("name", "size"), [("colpali", (500, 400)), ("colqwen2", (1120, 1120))])
def test_no_page_has_more_tokens_than_the_model_reports(
    name: str, size: tuple[int, int], folders: dict[str, Path], engines: dict[str, Engine]
) -> None:
    page = EmbedParts(((part_of(encoded(noise(*size))),),), Output.MULTIVECTOR)
    loaded = load_tiny(folders[name]).capabilities.media_tokens

    assert run(engines[name], page).tokens == loaded
    assert loaded == describe(folders[name], name, LoadOptions()).media_tokens


def test_vectors_that_form_no_grid_are_not_called_one() -> None:
    row = np.arange(3, 9)

    assert PatchGrid(3, 2, 3) == patch_grid(row, (2, 3))
    assert PatchGrid(3, 2, 2) == patch_grid(row[:4], None)
    assert None is patch_grid(row, None)
    assert None is patch_grid(row, (2, 2))
    assert None is patch_grid(row[[0, 1, 2, 4]], None)
    assert None is patch_grid(row[:0], None)


def test_capabilities_name_late_interaction_and_images(folders: dict[str, Path]) -> None:
    found = load_tiny(folders["colqwen2"]).capabilities

    assert found.outputs == MULTIVECTOR
    assert {Operation.ENCODE, Operation.EMBED_IMAGE} <= found.operations
    assert not {Operation.EMBED, Operation.RERANK} & found.operations


def test_a_long_query_keeps_its_fillers(engines: dict[str, Engine]) -> None:
    long = "word " * 600
    reply = run(engines["colqwen2"], Encode((long, "a"), MULTIVECTOR))
    refusal = Encode(("a", long), MULTIVECTOR, truncate=Truncate.ERROR)

    assert reply.truncated == (0,)
    assert reply.input_tokens is not None
    assert reply.input_tokens[0] == QUERY_LENGTH
    with pytest.raises(InvalidWork, match="maximum context length") as failure:
        run(engines["colqwen2"], refusal)
    assert failure.value.input_index == 1


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (EmbedParts(PAGES[:1]), "gives no dense output"),
        (EmbedParts(PAGES[:1], Output.MULTIVECTOR, dimensions=8), "`dimensions` does not apply"),
        (Encode(("a",), MULTIVECTOR, truncate=Truncate.LEFT), "cannot cut the left end"),
        (Rerank("a", ("b",)), "does not rerank"),
    ],
)
def test_requests_that_the_model_cannot_compute_are_refused(
    work: EmbedParts, message: str, engines: dict[str, Engine]
) -> None:
    with pytest.raises(UnsupportedWork, match=message):
        run(engines["colpali"], work)


def test_a_page_too_narrow_for_its_processor_is_an_error_of_its_input(engines: dict[str, Engine]) -> None:
    line = (part_of(encoded(noise(10_000, 10))),)

    with pytest.raises(InvalidWork, match="aspect ratio") as failure:
        run(engines["colqwen2"], EmbedParts((PAGES[0], line), Output.MULTIVECTOR))

    assert failure.value.input_index == 1


def test_settings_that_do_not_apply_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelUnavailable, match="int8"):
        load(folders["colqwen2"], "tiny", LoadOptions("int8", "cpu"))
    with pytest.raises(ModelUnavailable, match="`compile` does not serve"):
        load(folders["colqwen2"], "tiny", LoadOptions("float32", "cpu", compiled=True))
