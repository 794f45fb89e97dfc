"""Tests of downloads from a Hub on this machine, and of copies in its cache."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.checkpoints.auto_map import ClassReference
from backends.checkpoints.locations import locate_checkpoint, locate_code, locate_tokenizer
from backends.contract.errors import ModelUnavailable
from tests.fakes.hub import FakeHub, Files, commit_of, serving_hub, use_hub, write_cache

CONFIG = {"model_type": "new", "auto_map": {"AutoModel": "org/code--modeling.NewModel"}}
OWN_CONFIG = {"model_type": "own", "auto_map": {"AutoModel": "modeling.OwnModel"}}
CODE: Files = {
    "modeling.py": b"from .layers import Layer\n",
    "layers.py": b"class Layer: ...\n",
    "x.txt": b"",
}
NEW_MODEL = ClassReference("org/code", "modeling", "NewModel")


def repository(config: object = CONFIG, **files: bytes) -> dict[str, bytes]:
    """Return a checkpoint's files; names use `__` for `/`, and `_DOT_` for a point."""
    named = {name.replace("__", "/").replace("_DOT_", "."): content for name, content in files.items()}
    return {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{  }", **named}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of the Hub's client."""
    folder = tmp_path / "cache"
    use_hub(monkeypatch, HF_HUB_CACHE=str(folder))
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, HF_HUB_OFFLINE=True)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve one repository of code."""
    with serving_hub({"org/code": CODE}, monkeypatch) as fake:
        yield fake


def serve(hub: FakeHub, files: Files) -> None:
    hub.repositories = {"org/code": CODE, "org/model": files}


def paths_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_fetches_safetensors_or_bin_of_each_folder(hub: FakeHub) -> None:
    wanted = {
        "model.safetensors": b"s",
        "2_Dense/config.json": b"{}",
        "2_Dense/pytorch_model.bin": b"d",
        "3_Dense/model.safetensors": b"t",
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"a",
        "spiece.model": b"p",
        "vocab.txt": b"v",
        "1_Pooling/config.json": b"{}",
        "sparse_linear.pt": b"l",
    }
    unwanted = {
        "pytorch_model.bin": b"b",
        "3_Dense/pytorch_model.bin": b"u",
        "onnx/model.onnx": b"o",
        "onnx/model.safetensors": b"o",
        "model.fp16.safetensors": b"h",
        "modeling.py": b"",
        "training_args.bin": b"r",
        "README.md": b"#",
    }
    serve(hub, {**repository({}), **wanted, **unwanted})

    folder = locate_checkpoint("org/model")

    assert {*wanted, "config.json", "tokenizer.json"} == paths_of(folder)


def test_fetches_shards_and_code_of_its_own_repository(hub: FakeHub) -> None:
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    files = {
        **repository(OWN_CONFIG),
        "model.safetensors.index.json": index,
        "model-00001-of-00002.safetensors": b"1",
        "modeling.py": b"from .parts import Layer\n",
        "parts.py": b"",
        "layers/more.py": b"",
    }
    serve(hub, files)

    assert set(files) == paths_of(locate_checkpoint("org/model", with_code=True))


def test_whole_copy_is_found_again_without_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(hub, {**repository({}), "model.safetensors": b"s", "onnx/model.onnx": b"o", "README.md": b"#"})
    folder = locate_checkpoint("org/model")
    hub.downloads.clear()
    use_hub(monkeypatch, HF_HUB_OFFLINE=True)

    assert folder == locate_checkpoint("org/model")
    assert folder == locate_tokenizer("org/model")
    assert [] == hub.downloads


def test_copy_without_its_code_is_completed(hub: FakeHub, cache: Path) -> None:
    cached = {
        **repository(OWN_CONFIG),
        "modules.json": b"[]",
        "model.safetensors": b"s",
        "modeling.py": b"from .parts import A",
    }
    serve(hub, {**cached, "parts.py": b"A = 1\n"})
    write_cache(cache, "org/model", cached)

    assert "parts.py" not in paths_of(locate_checkpoint("org/model"))
    assert "parts.py" in paths_of(locate_checkpoint("org/model", with_code=True))
    assert ["org/model/parts.py"] == hub.downloads


@pytest.mark.parametrize(
    "missing", ["2_Dense/model.safetensors", "model-00002-of-00002.safetensors", "config.json"]
)
def test_incomplete_copy_is_completed(hub: FakeHub, cache: Path, missing: str) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {
        **repository({}),
        "modules.json": json.dumps(
            [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
        ).encode(),
        "2_Dense/config.json": b"{ }",
        "2_Dense/model.safetensors": b"d",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": dict(zip("ab", shards, strict=True))}
        ).encode(),
        **{name: name.encode() for name in shards},
    }
    serve(hub, files)
    write_cache(cache, "org/model", {name: files[name] for name in files if name != missing})

    assert missing in paths_of(locate_checkpoint("org/model"))
    assert [f"org/model/{missing}"] == hub.downloads


def test_copy_that_may_lack_its_modules_is_completed(
    hub: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {**repository({}), "model.safetensors": b"s"}
    serve(hub, {**plain, "modules.json": b"[]", "1_Pooling/config.json": b"{}"})
    write_cache(cache, "org/model", plain)

    with monkeypatch.context() as context:
        use_hub(context, HF_HUB_OFFLINE=True)
        locate_checkpoint("org/model")
        assert "no modules.json" in caplog.text

    assert {"modules.json", "1_Pooling/config.json"} < paths_of(locate_checkpoint("org/model"))


def test_refused_model_costs_no_download_of_weights(hub: FakeHub) -> None:
    serve(hub, {**repository(), "model.safetensors": b"s"})

    def refuse(folder: Path) -> None:
        raise ModelUnavailable(f"refused by {(folder / 'config.json').name}")

    with pytest.raises(ModelUnavailable, match=r"refused by config\.json"):
        locate_checkpoint("org/model", approve=refuse)
    assert "org/model/model.safetensors" not in hub.downloads


def test_fetches_code_of_another_repository_at_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    commit = commit_of("org/code")

    folder = locate_code(tmp_path, [NEW_MODEL], commit)

    assert commit == folder.name
    assert {"modeling.py", "layers.py"} == paths_of(folder)
    hub.downloads.clear()
    assert folder == locate_code(tmp_path, [NEW_MODEL], commit)
    assert [] == hub.downloads


@pytest.mark.usefixtures("offline")
def test_finds_code_in_the_cache_without_a_network(cache: Path, tmp_path: Path) -> None:
    snapshot = write_cache(cache, "org/code", CODE)

    assert snapshot == locate_code(tmp_path, [NEW_MODEL], commit_of("org/code"))
    with pytest.raises(ModelUnavailable, match="org/code"):
        locate_code(tmp_path, [NEW_MODEL], "0" * 40)


@pytest.mark.usefixtures("offline")
def test_partial_code_in_the_cache_is_not_taken(cache: Path, tmp_path: Path) -> None:
    write_cache(cache, "org/code", {"modeling.py": CODE["modeling.py"]})

    with pytest.raises(ModelUnavailable, match=r"layers\.py|could not be fetched"):
        locate_code(tmp_path, [NEW_MODEL], commit_of("org/code"))


def test_names_the_module_that_a_code_repository_lacks(hub: FakeHub, tmp_path: Path) -> None:
    other = ClassReference("org/code", "no_such", "NewModel")

    with pytest.raises(ModelUnavailable, match=r"org/code has no no_such\.py at .*`code_revision`"):
        locate_code(tmp_path, [other], commit_of("org/code"))


@pytest.mark.usefixtures("offline")
def test_code_beside_the_weights_of_a_folder_serves_every_repository(cache: Path, tmp_path: Path) -> None:
    for name, content in CODE.items():
        (tmp_path / name).write_bytes(content)
    snapshot = write_cache(cache, "org/model", {**repository(), **CODE})

    assert tmp_path == locate_code(tmp_path, [NEW_MODEL], None)
    # In a snapshot, files of the same name may be different code.
    with pytest.raises(ModelUnavailable, match="org/code"):
        locate_code(snapshot, [NEW_MODEL], commit_of("org/code"))


def test_names_the_missing_file_of_a_folder(tmp_path: Path) -> None:
    for name, content in {**repository(OWN_CONFIG), "model.safetensors": b"s"}.items():
        (tmp_path / name).write_bytes(content)

    assert tmp_path == locate_checkpoint(str(tmp_path))
    with pytest.raises(ModelUnavailable, match=r"not a whole checkpoint: it lacks modeling\.py"):
        locate_checkpoint(str(tmp_path), with_code=True)
