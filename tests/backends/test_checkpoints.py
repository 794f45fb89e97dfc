"""Tests of the search for a model's files."""

from pathlib import Path

import pytest

from backends.checkpoints.locations import locate_checkpoint, locate_tokenizer
from backends.checkpoints.needed_files import is_path
from backends.contract.errors import ModelUnavailable


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working directory whose folder has the form of a hub id, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "private" / "model"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return tmp_path


def test_hub_id_never_names_a_local_folder(working_directory: Path) -> None:
    for locate in (locate_checkpoint, locate_tokenizer):
        with pytest.raises(ModelUnavailable):
            locate("private/model")


def test_path_names_a_local_folder(working_directory: Path) -> None:
    assert working_directory / "private" / "model" == locate_checkpoint(
        str(working_directory / "private/model")
    )
    assert Path("private/model") == locate_checkpoint("./private/model")


@pytest.mark.parametrize("name", [".", "..", "~", "~/x", "./x", "/x"])
def test_recognizes_paths(name: str) -> None:
    assert is_path(name)
