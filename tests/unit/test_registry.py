"""Models of this host: listing, downloads from a fake Hub, checks, removal, and the bound on the disk."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.checkpoints.hub import CachedModel
from backends.checkpoints.locations import DEFAULT_MODEL, hub
from backends.contract.errors import ModelUnavailable
from backends.torch.wire import SmokeLoad
from gateway.cli.main import main
from gateway.config.schema import UpstreamSettings
from gateway.declared import checkpoints
from gateway.declared.checkpoints import (
    NoSpace,
    Records,
    Registry,
    RegistryBusy,
    RegistryError,
    damaged_files,
    digest_of,
    models_to_remove,
    used_models,
)
from gateway.declared.host import CheckpointRecord
from tests.fakes.hub import FakeHub, Files, commit_of, serving_hub, use_hub, write_cache

FILES: Files = {
    "config.json": b'{"model_type": "bert"}',
    "modules.json": b"[]",
    "tokenizer.json": b"{}",
    "model.safetensors": b"w" * 5000,
    "onnx/model.onnx": b"o" * 9000,
}
SMALL_BYTES = sum(len(FILES[name]) for name in ("config.json", "modules.json", "tokenizer.json"))
WORKS = SmokeLoad(None, ("embed",), 384, 256, 1.5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache of the Hub."""
    folder = tmp_path / "cache"
    folder.mkdir()
    use_hub(monkeypatch, HF_HUB_CACHE=str(folder))
    return folder


@pytest.fixture
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve the repository org/model."""
    del cache
    with serving_hub({"org/model": FILES}, monkeypatch) as fake:
        yield fake


def registry(tmp_path: Path, bound_bytes: int | None = None, **upstreams: str | None) -> Registry:
    """Return a registry with a folder of its own. upstreams: name → model of a torch upstream."""
    settings = {name: UpstreamSettings(backend="torch", model=model) for name, model in upstreams.items()}
    return Registry(Records(tmp_path / "state"), used_models(settings), bound_bytes)


def no_report(done: int, total: int | None, rate: float) -> None:
    """Take no notice of progress."""
    del done, total, rate


def states(models: Registry) -> dict[str, str]:
    """Return the state of each listed model."""
    return {model.model: model.state for model in models.models()}


def test_configured_and_cached_models_are_listed(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/cached", FILES)
    models = registry(tmp_path, a="org/configured", b="org/cached", c="org/cached", d="/a/folder", e=None)
    listed = {model.model: model for model in models.models()}
    assert {"org/configured": "available", "org/cached": "downloaded"} == states(models)
    assert ("b", "c") == listed["org/cached"].configured
    assert sum(map(len, FILES.values())) == listed["org/cached"].stored_bytes
    assert listed["org/configured"].stored_bytes == 0


def test_a_model_outside_the_cache_has_the_size_of_its_package(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cache(cache, "org/cached", FILES)
    config = tmp_path / "router.yaml"
    config.write_text(
        "upstreams:\n  a: {backend: torch, model: org/missing}\n"
        f"  b: {{backend: torch, model: {DEFAULT_MODEL}}}\n"
        "models: {m: {upstream: a}, n: {upstream: b}}\n"
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gateway", "models", "list", "-c", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()

    assert not ended.value.code
    rows = {line.split()[0]: line.split()[2] for line in capsys.readouterr().out.splitlines()}
    assert ("–", "0.0") == (rows["org/missing"], rows["org/cached"])
    # The original weights alone are 90.9 MB.
    assert 90 < float(rows[DEFAULT_MODEL]) < 100


def test_an_empty_list_says_so(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del cache
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gateway", "models", "list"])
    with pytest.raises(SystemExit) as ended:
        main()

    assert not ended.value.code
    shown = capsys.readouterr()
    assert not shown.out
    assert "the cache is empty" in shown.err


def test_a_model_is_pulled_once(tmp_path: Path, fake_hub: FakeHub) -> None:
    models, reports = registry(tmp_path), []
    folder = models.pull("org/model", None, lambda *report: reports.append(report))
    assert commit_of("org/model") == folder.name
    assert {"org/model": "downloaded"} == states(models)
    assert (SMALL_BYTES + 5000,) * 2 == reports[-1][:2]
    assert "org/model/onnx/model.onnx" not in fake_hub.downloads
    sent = len(fake_hub.downloads)
    models.pull("org/model", None, no_report)
    assert sent == len(fake_hub.downloads)


@pytest.mark.parametrize("name", ["", "..", "../../etc", "a/b/c", "org/--", "org/model/"])
def test_a_name_that_is_no_repository_is_refused(tmp_path: Path, cache: Path, name: str) -> None:
    models = registry(tmp_path)
    for action in (lambda: models.pull(name, None, no_report), lambda: models.remove(name)):
        with pytest.raises(RegistryError, match="neither a folder"):
            action()
    with pytest.raises(RegistryError, match="neither a folder"):
        models.verify(name, lambda _, __: WORKS)
    assert [] == list(cache.iterdir())


def test_the_cause_of_a_failed_download_is_kept(tmp_path: Path, fake_hub: FakeHub) -> None:
    fake_hub.repositories = {}
    models = registry(tmp_path)
    with pytest.raises(RegistryError, match="could not be fetched"):
        models.pull("org/model", None, no_report)
    (found,) = models.models()
    assert "failed" == found.state
    assert found.record is not None
    assert "could not be fetched" in (found.record.error or "")


def test_two_processes_do_not_work_on_one_model(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/model", FILES)
    models = registry(tmp_path)
    with Records(tmp_path / "state").working_on("org/model"):
        with pytest.raises(RegistryBusy, match="another process"):
            models.pull("org/model", None, no_report)
        with pytest.raises(RegistryBusy):
            models.remove("org/model")
    models.remove("org/model")


def test_a_model_is_verified(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/model", FILES)
    models, loads = registry(tmp_path), []

    def load_once(model: str, commit: str | None) -> SmokeLoad:
        loads.append((model, commit))
        assert {"org/model": "loading"} == states(models)
        return WORKS

    assert models.verify("org/model", load_once) == WORKS
    assert [("org/model", commit_of("org/model"))] == loads
    (found,) = models.models()
    assert found.record is not None
    assert ("verified", 384, 1.5) == (found.state, found.record.dimensions, found.record.load_s)
    with pytest.raises(RegistryError, match="pull it first"):
        models.verify("org/other", load_once)


def test_the_cause_of_a_failed_load_is_kept(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/model", FILES)
    models = registry(tmp_path)
    with pytest.raises(RegistryError, match="no such architecture"):
        models.verify("org/model", lambda _, __: SmokeLoad("no such architecture"))
    assert {"org/model": "failed"} == states(models)


def test_damaged_files_are_found_before_a_load(tmp_path: Path, cache: Path) -> None:
    snapshot = write_cache(cache, "org/model", FILES)
    assert [] == damaged_files(snapshot)
    (snapshot / "model.safetensors").resolve().write_bytes(b"w" * 4999 + b"x")
    models = registry(tmp_path)
    with pytest.raises(RegistryError, match=r"files differ from the Hub's: model\.safetensors; remove"):
        models.verify("org/model", lambda _, __: pytest.fail("it was loaded"))
    assert {"org/model": "failed"} == states(models)
    (snapshot / "modules.json").resolve().unlink()
    assert ["model.safetensors", "modules.json"] == damaged_files(snapshot)


def test_large_files_are_stored_under_their_sha256(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert "ba7816bf" == digest_of(file, 64)[:8]
    # As `git hash-object` computes it.
    assert "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f" == digest_of(file, 40)


def test_a_model_in_use_is_not_removed(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/used", FILES)
    write_cache(cache, "org/unused", FILES)
    models = registry(tmp_path, a="org/used")
    with pytest.raises(RegistryError, match="in use by a"):
        models.remove("org/used")
    assert models.remove("org/unused") == sum(map(len, FILES.values()))
    assert {"org/used": "downloaded"} == states(models)
    with pytest.raises(RegistryError, match="not in the cache"):
        models.remove("org/unused")


def test_removal_follows_no_link_out_of_the_cache(tmp_path: Path, cache: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    snapshot = write_cache(cache, "org/model", FILES)
    (snapshot / "link").symlink_to(outside)
    registry(tmp_path).remove("org/model")
    assert "kept" == (outside / "kept").read_text()


def model(name: str, size: int, used_s: float) -> CachedModel:
    """Return a cached model."""
    return CachedModel(name, Path("/cache") / name, ("c",), size, used_s)


def test_the_models_unused_for_longest_make_room() -> None:
    cached = [model("a", 40, 3.0), model("b", 30, 1.0), model("c", 30, 2.0)]
    assert [] == models_to_remove(cached, (), 10, 110)
    assert ["b"] == [found.repository for found in models_to_remove(cached, (), 10, 100)]
    assert ["c", "a"] == [found.repository for found in models_to_remove(cached, ("b",), 60, 100)]
    with pytest.raises(NoSpace, match="the other models are in use"):
        models_to_remove(cached, ("a", "b"), 60, 100)


def test_a_pull_keeps_below_the_bound(tmp_path: Path, cache: Path, fake_hub: FakeHub) -> None:
    for age, name in enumerate(("org/old", "org/older", "org/used")):
        write_cache(cache, name, {"config.json": b"c" * 4000})
        for path in (cache / f"models--{name.replace('/', '--')}").rglob("*"):
            if path.is_file():
                os.utime(path, (time.time() - 1000 * (age + 1),) * 2)
    models = registry(tmp_path, 14_000, u="org/used")
    models.pull("org/model", None, no_report)
    assert {"org/old", "org/used", "org/model"} == set(states(models))
    with pytest.raises(RegistryError, match=r"too many for `registry\.disk_bytes`"):
        registry(tmp_path, 6_000, u="org/used", m="org/model").pull("org/model", None, no_report)
    assert fake_hub.downloads


def test_downloads_at_once_keep_below_the_bound_together(tmp_path: Path, fake_hub: FakeHub) -> None:
    records = Records(tmp_path / "state")
    fits = registry(tmp_path, 14_000)
    with records.working_on("org/other"):
        # Of another process, which has written nothing yet.
        records.write("org/other", CheckpointRecord("downloading", total_bytes=9_000))
        with pytest.raises(RegistryError, match=r"too many for `registry\.disk_bytes`"):
            fits.pull("org/model", None, no_report)
        assert not fake_hub.downloads
        registry(tmp_path, 24_000).pull("org/model", None, no_report)
    assert fake_hub.downloads


def test_a_download_that_ended_reserves_nothing(tmp_path: Path, fake_hub: FakeHub) -> None:
    Records(tmp_path / "state").write("org/other", CheckpointRecord("downloading", total_bytes=9_000))
    registry(tmp_path, 14_000).pull("org/model", None, no_report)
    assert fake_hub.downloads


def test_tokenizers_of_remote_upstreams_are_in_use() -> None:
    upstreams = {
        "a": UpstreamSettings(backend="tei", replicas=("http://tei",), model="served", tokenizer="org/tok"),
        "b": UpstreamSettings(backend="torch", model="org/own", token_encoding="model"),
        "c": UpstreamSettings(backend="torch", model="org/tok", token_encoding="./ids"),
    }
    assert {"org/tok": ("a", "c"), "org/own": ("b",)} == used_models(upstreams)


def test_a_link_out_of_the_cache_is_no_file_of_the_hub(tmp_path: Path, cache: Path) -> None:
    snapshot = write_cache(cache, "org/model", FILES)
    assert [] == damaged_files(snapshot)
    (tmp_path / "outside").write_text("{}")
    (snapshot / "more.json").symlink_to(tmp_path / "outside")

    assert ["more.json"] == damaged_files(snapshot)


def test_a_copy_with_the_same_commit_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.hub.commit_of", lambda _: "a" * 40)
    for name in ("org/used", "fork/copy"):
        write_cache(cache, name, FILES)
    commits = {found.repository: found.commits for found in hub.cached_models()}
    assert commits["org/used"] == commits["fork/copy"]
    hub.remove_cached("fork/copy", commits["fork/copy"])

    assert ["org/used"] == [found.repository for found in hub.cached_models()]


def test_a_size_that_is_not_known_is_refused_below_a_bound(
    tmp_path: Path, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> int:
        raise ModelUnavailable("the Hub cannot be reached")

    monkeypatch.setattr(checkpoints, "downloaded_bytes", unreachable)
    with pytest.raises(RegistryError, match="needs the model's size: the Hub cannot be reached"):
        registry(tmp_path, 10).pull("org/model", None, no_report)
    assert not fake_hub.downloads


def test_a_download_of_other_content_fails(
    tmp_path: Path, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_file = fake_hub._file

    def wrong_file(name: str, file: str, method: str) -> Any:
        status, headers, content = true_file(name, file, method)
        return status, headers, b"x" * len(content) if file == "model.safetensors" else content

    monkeypatch.setattr(fake_hub, "_file", wrong_file)
    with pytest.raises(RegistryError, match=r"files differ from the Hub's: model\.safetensors"):
        registry(tmp_path).pull("org/model", None, no_report)
    assert {"org/model": "failed"} == states(registry(tmp_path))


def test_a_killed_download_or_load_is_shown_as_failed(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/loaded", FILES)
    Records(tmp_path / "state").write("org/pulled", CheckpointRecord("downloading", total_bytes=5))
    Records(tmp_path / "state").write("org/loaded", CheckpointRecord("loading"))
    models = registry(tmp_path)
    assert {"org/pulled": "failed", "org/loaded": "failed"} == states(models)
    assert "it ended while downloading" in [found.record and found.record.error for found in models.models()]


def test_a_model_that_is_worked_on_is_not_evicted(tmp_path: Path, cache: Path, fake_hub: FakeHub) -> None:
    write_cache(cache, "org/old", FILES)
    with Records(tmp_path / "state").working_on("org/old"), pytest.raises(RegistryError, match="in use"):
        registry(tmp_path, 12_000).pull("org/model", None, no_report)
    assert (cache / "models--org--old").exists()
    assert not fake_hub.downloads


def test_a_verified_model_stays_verified(tmp_path: Path, cache: Path) -> None:
    write_cache(cache, "org/model", FILES)
    Records(tmp_path / "state").write("org/model", CheckpointRecord("verified", commit_of("org/model")))
    models = registry(tmp_path)
    models.pull("org/model", None, no_report)
    assert {"org/model": "verified"} == states(models)


def test_a_damaged_file_of_records_counts_as_none(tmp_path: Path, cache: Path) -> None:
    records = Records(tmp_path / "state")
    records.write("org/a", CheckpointRecord("failed", error="x" * 10_000))
    assert 2000 == len(records.read()["org/a"].error or "")
    assert {"org/a"} == json.loads((tmp_path / "state" / "registry.json").read_text()).keys()
    (tmp_path / "state" / "registry.json").write_text("{")
    assert {} == records.read()
    assert cache.is_dir()
    assert [] == hub.cached_models()
