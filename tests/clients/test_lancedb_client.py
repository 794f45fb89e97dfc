"""LanceDB's embedding function for OpenAI's API, in a table. It knows the names of OpenAI's models only."""

from pathlib import Path
from typing import Any

import lancedb
import pytest
from lancedb.embeddings import get_registry
from lancedb.pydantic import LanceModel, Vector

from tests.clients.conftest import Gateway, run_documented

MODEL = "text-embedding-3-small"
DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]


def function_of(gateway: Gateway, key: str | None = None, model: str = MODEL, dim: int = 384) -> Any:
    registry = get_registry()
    # The function takes secrets by name only.
    registry.set_var("gateway_key", key or gateway.key)
    return registry.get("openai").create(
        name=model,
        base_url=f"{gateway.url}/v1",
        api_key="$var:gateway_key",
        dim=dim,
        max_retries=0,
    )


def found_by(function: Any, folder: Path) -> set[str]:
    class Row(LanceModel):
        text: str = function.SourceField()
        vector: Vector(function.ndims()) = function.VectorField()  # type: ignore[valid-type]

    table = lancedb.connect(folder).create_table("texts", schema=Row)
    table.add([{"text": text} for text in DOCUMENTS])
    return {row.text for row in table.search("fruit to eat").limit(2).to_pydantic(Row)}


@pytest.mark.parametrize("dim", [384, 64])
def test_a_table_finds_the_nearest_texts(gateway: Gateway, tmp_path: Path, dim: int) -> None:
    assert {"an apple", "a pear"} == found_by(function_of(gateway, dim=dim), tmp_path)


def test_errors_name_openais(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="AuthenticationError"):
        found_by(function_of(gateway, key="wrong"), tmp_path / "a")
    with pytest.raises(RuntimeError, match="NotFoundError"):
        found_by(function_of(gateway, model="text-embedding-3-large"), tmp_path / "b")


def test_the_documented_lines_make_a_function(gateway: Gateway, tmp_path: Path) -> None:
    function = run_documented(gateway, "connect-databases", "LanceDB")["function"]

    assert {"an apple", "a pear"} == found_by(function, tmp_path)
