"""`gateway models`: what `inspect` prints for a checkpoint, and the trial load of `verify`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.checkpoints.locations import DEFAULT_MODEL
from backends.contract import Capabilities
from backends.torch import wire
from backends.torch.load.inspection import inspect, inspect_folder
from backends.torch.serving.smoke import smoke_load
from backends.torch.stock import small_network
from gateway.cli import main as command_line
from gateway.cli import models as command
from gateway.config.load import parse_config
from gateway.processes import engine_process
from tests.engine.checkpoints import DECODER, ENCODERS, make_encoder, make_language_model
from tests.fakes.hub import write_cache
from tests.waiting import PATIENCE_S

GATEWAY = (sys.executable, "-m", "gateway", "models", "inspect")


@pytest.fixture
def encoder(minilm: Path, tmp_path: Path) -> Path:
    return make_encoder(ENCODERS["bert"][0](), minilm, tmp_path / "encoder")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GATEWAY, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def options(*arguments: str) -> object:
    return command_line.full_parser().parse_args(["models", "inspect", *arguments])


@pytest.mark.slow
def test_prints_what_an_operator_needs_for_a_served_checkpoint() -> None:
    ended = run(DEFAULT_MODEL, "--dtype", "float32")

    facts = dict(line.strip().split("  ", 1) for line in ended.stdout.splitlines() if "  " in line.strip())
    found = {name: facts[name].strip() for name in ("state", "kind", "pooling", "dimensions", "packed")}
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {
        "state": "served",
        "kind": "dense",
        "pooling": "mean",
        "dimensions": "384",
        "packed": "yes",
    } == found
    assert facts["maximum tokens"].strip() == "256"
    assert facts["weights"].strip() == "23 million parameters, 91 MB of files, about 91 MB in memory"
    _, _, snippet = ended.stdout.partition("\nupstreams:")
    config = parse_config(f"upstreams:{snippet}", {}, Path.cwd())
    assert config.upstreams["all-minilm-l6-v2"].model == DEFAULT_MODEL
    assert config.models["all-minilm-l6-v2"].upstream == "all-minilm-l6-v2"


@pytest.mark.slow
def test_prints_the_refusal_of_an_upstream_as_json_and_fails(encoder: Path, tmp_path: Path) -> None:
    weights = load_file(encoder / "model.safetensors")
    del weights["encoder.layer.1.attention.self.query.weight"]
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    config = tmp_path / "router.yaml"
    config.write_text(
        f"upstreams: {{small: {{backend: torch, model: {encoder}}}}}\n"
        "models: {small: {upstream: small}}\n"
    )

    ended = run("small", "-c", str(config), "--json")

    found = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert "missing: encoder.layer.1.attention.self.query.weight" in found["refusal"]
    assert (str(encoder), ["BertModel"]) == (found["checkpoint"], found["architectures"])


def test_unknown_upstream_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(
        "upstreams: {a: {backend: torch, model: org/x}, b: {backend: tei, replicas: ['http://tei']}}\n"
        "models: {a: {upstream: a}}\n"
    )

    assert command.run_models(options("b", "-c", str(config)), {}) == 1
    assert "no torch upstream 'b'; it has: a" in capsys.readouterr().err


def test_installation_without_the_engine_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_process, "find_spec", lambda _: None)

    assert command.run_models(options(DEFAULT_MODEL), {}) == 1
    assert "needs torch and transformers" in capsys.readouterr().err


def test_hub_id_that_is_not_here_is_refused_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    found = inspect(wire.ModelBoot("x", "org/not-here"))

    assert found.refusal is not None
    assert "is not on this machine" in found.refusal


def test_settings_change_what_a_checkpoint_is(minilm: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    folder = make_language_model(ENCODERS["bert"][0](), minilm, tmp_path / "masked", AutoModelForMaskedLM)

    dense = inspect(wire.ModelBoot("x", str(folder), dtype="float32"))
    sparse = inspect(wire.ModelBoot("x", str(folder), dtype="bfloat16", pooling="splade"))

    assert (dense.kind, sparse.kind) == ("dense", "sparse")
    assert dense.weights.memory_bytes == 4 * (dense.weights.elements or 0)
    assert (sparse.weights.memory_bytes or 0) < (dense.weights.memory_bytes or 0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cuda:7"}, "there is no device 'cuda:7'"),
        ({"runtime": "openvino", "dtype": "float16"}, "needs `dtype: float32` or `bfloat16`"),
    ],
)
def test_what_a_start_would_refuse_is_refused(encoder: Path, settings: dict[str, Any], reason: str) -> None:
    found = inspect_folder(wire.ModelBoot("x", str(encoder), **settings), encoder)

    assert reason in (found.refusal or "")


def test_weights_that_are_not_here_are_named_as_unknown(encoder: Path) -> None:
    (encoder / "model.safetensors").unlink()

    found = inspect_folder(wire.ModelBoot("x", "acme/encoder"), encoder)

    assert found.refusal is None
    assert found.weights.file_bytes is None
    assert any("were not compared" in note for note in found.notes)


def test_a_folder_without_weights_is_refused_as_by_a_load(encoder: Path) -> None:
    (encoder / "model.safetensors").unlink()

    found = inspect(wire.ModelBoot("x", str(encoder)))

    assert "it lacks model.safetensors" in (found.refusal or "")
    assert found.kind == "dense"


def test_a_relative_path_of_a_folder_is_no_hub_id(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(encoder.parent.parent)
    relative = f"{encoder.parent.name}/{encoder.name}"

    assert command._boot(options(relative), {})[0].model == str(encoder)
    assert command._boot(options("acme/encoder"), {})[0].model == "acme/encoder"


def test_configured_prompts_are_shown_with_their_roles() -> None:
    capabilities = Capabilities("m", frozenset(), prompts={"query": "", "document": ""})
    note = "the checkpoint brings no prompts; if its card asks for one, set `prompts` of the upstream"
    found = wire.Inspection("m", capabilities=capabilities, kind="dense", packed=True, notes=(note,))

    rows = dict(command._rows(found, {"query": "query: ", "passage": "passage: "}))

    assert rows["prompt query (configured)"] == '"query: "'
    assert (rows["prompt of queries"], rows["prompt of documents"]) == ("query", "passage")
    assert "note" not in rows
    assert dict(command._rows(found, {}))["note"] == note


@pytest.mark.slow
def test_verify_loads_a_cached_model_and_keeps_what_it_found(encoder: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in encoder.iterdir() if path.is_file()}
    cache, state = tmp_path / "hub", tmp_path / "state"
    write_cache(cache, "org/tiny", files)
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "XDG_STATE_HOME": str(state)}
    command = [sys.executable, "-m", "gateway", "models"]
    ended = [
        subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
        for arguments in (("verify", "org/tiny"), ("list", "--json"), ("rm", "org/tiny"), ("rm", "org/tiny"))
    ]
    assert [0, 0, 0, 1] == [process.returncode for process in ended], [process.stderr for process in ended]
    assert ended[0].stdout.startswith("org/tiny is verified: detokenize, embed")
    (listed,) = json.loads(ended[1].stdout)
    assert ("org/tiny", "verified", 32) == (listed["model"], listed["state"], listed["record"]["dimensions"])
    assert "not in the cache" in ended[3].stderr


def test_the_cause_of_a_trial_load_that_fails(encoder: Path) -> None:
    assert smoke_load(wire.ModelBoot("tiny", str(encoder))).dimensions == 32
    (encoder / "model.safetensors").write_bytes(b"no weights")
    found = smoke_load(wire.ModelBoot("tiny", str(encoder)))
    assert found.error
    assert found.dimensions is None


def test_two_inspections_give_one_answer(minilm: Path, tmp_path: Path) -> None:
    config = transformers.Lfm2Config(**DECODER | {"layer_types": ["conv", "full_attention", "conv"]})
    folder = make_encoder(config, minilm, tmp_path)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    boot = wire.ModelBoot("tiny", str(folder), dtype="float32", device="cpu")
    seen: list[torch.Tensor] = []
    made = small_network.random_network

    def recorded(*arguments: Any) -> Any:
        network = made(*arguments)
        seen.extend(weight.detach().clone() for weight in network.parameters() if not weight.is_meta)
        return network

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_network, "random_network", recorded)
        first, second = inspect_folder(boot, folder), inspect_folder(boot, folder)

    assert first == second
    half = len(seen) // 2
    assert half
    assert all(torch.equal(*pair) for pair in zip(seen[:half], seen[half:], strict=True))
