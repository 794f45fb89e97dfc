"""Choice of adapters: what is merged, what is refused, and what a network is without one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.contract import Embed, EmbedReply, Vectors
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.recipe.options import TaskSettings
from backends.torch.load.inspection import inspect_folder
from backends.torch.wire import ModelBoot
from tests.engine.checkpoints import SMALL, make_encoder
from tests.engine.engines import TEXTS, cosines, engine_on, load_tiny, run_work
from tests.engine.families.adapted import FAMILIES
from tests.engine.families.checkpoint import write_checkpoint
from tests.engine.families.lora import write_folder

FAMILY = {family.name: family for family in FAMILIES}
TEXT = tuple(TEXTS[:6])


async def vectors_of(folder: Path, adapter: str | None, prompt_name: str | None = None) -> Vectors:
    model = load_tiny(folder, settings=TaskSettings(adapter=adapter))
    return (await run_work(engine_on(model), Embed(TEXT, prompt_name=prompt_name), EmbedReply)).vectors


@pytest.fixture(scope="module")
def jina_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILY["jina-v3"], tmp_path_factory.mktemp("jina") / "v3")


@pytest.fixture
def bert(minilm: Path, tmp_path: Path) -> Path:
    """Return a checkpoint with an adapter in the folder `law`."""
    folder = make_encoder(transformers.BertConfig(**SMALL), minilm, tmp_path / "bert")
    write_folder(transformers.BertModel, "law", ("query", "value", "output.dense"), folder)
    return folder


def change(folder: Path, **keys: object) -> None:
    path = folder / "law" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


async def test_without_an_adapter_the_network_is_served_as_it_is(bert: Path) -> None:
    with torch.no_grad():
        network = transformers.AutoModel.from_pretrained(bert).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
        rows = [network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXT]
    expected = np.stack([row.mean(dim=0).numpy() for row in rows])

    plain, adapted = await vectors_of(bert, None), await vectors_of(bert, "law")

    assert cosines(plain, expected).min() > 0.99999
    assert cosines(plain, adapted).max() < 0.99


async def test_each_stacked_adapter_has_vectors_and_a_prompt_of_its_own(jina_v3: Path) -> None:
    plain = await vectors_of(jina_v3, None)
    query = await vectors_of(jina_v3, "retrieval.query")
    passage = await vectors_of(jina_v3, "retrieval.passage")

    assert max(cosines(a, b).max() for a, b in ((plain, query), (plain, passage), (query, passage))) < 0.999
    np.testing.assert_array_equal(query, await vectors_of(jina_v3, "retrieval.query", "retrieval.query"))
    with pytest.raises(InvalidWork, match=r"no prompt named 'retrieval\.passage'; it has: retrieval\.query"):
        await vectors_of(jina_v3, "retrieval.query", "retrieval.passage")


def test_inspection_names_the_adapters_of_a_network_that_is_served_without(bert: Path) -> None:
    plain = inspect_folder(ModelBoot("tiny", str(bert), dtype="float32", device="cpu"), bert)
    adapted = inspect_folder(ModelBoot("tiny", str(bert), adapter="law", device="cpu"), bert)

    assert any("merges one of: law" in note for note in plain.notes)
    assert adapted.refusal is None
    assert not any("adapter" in note for note in adapted.notes)


async def test_an_adapter_next_to_its_network_has_to_be_chosen(bert: Path) -> None:
    in_folder = await vectors_of(bert, "law")
    for path in (bert / "law").iterdir():
        path.rename(bert / path.name)

    with pytest.raises(ModelUnavailable, match="set `adapter` to one of: \\."):
        await vectors_of(bert, None)
    np.testing.assert_allclose(in_folder, await vectors_of(bert, "."), atol=1e-6)


def test_a_network_that_needs_an_adapter_is_refused_without_one(tmp_path: Path) -> None:
    folder = write_checkpoint(FAMILY["jina-v5"], tmp_path / "v5")

    with pytest.raises(ModelUnavailable, match="set `adapter` to one of: retrieval"):
        load_tiny(folder)


@pytest.mark.parametrize("name", ["medicine", "../bert/law", "/tmp", "..", ""])
def test_an_unknown_adapter_is_refused_with_the_known_ones(name: str, bert: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no adapter .*; it has: law"):
        load_tiny(bert, settings=TaskSettings(adapter=name))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("peft_type", "IA3"),
        ("modules_to_save", ["classifier"]),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("fan_in_fan_out", True),
        ("key_of_tomorrow", {"a": 1}),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(key: str, value: object, bert: Path) -> None:
    change(bert, **{key: value})

    with pytest.raises(ModelUnavailable, match=f"cannot merge: `{key}"):
        load_tiny(bert, settings=TaskSettings(adapter="law"))


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if ".lora_B." in name)]


def rename_layer(tensors: dict[str, torch.Tensor]) -> None:
    for end in ("A", "B"):
        name = next(name for name in tensors if f"layer.0.attention.self.query.lora_{end}" in name)
        tensors[name.replace("query", "question")] = tensors.pop(name)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if ".lora_B." in name)
    tensors[name] = torch.zeros(40, tensors[name].shape[1])


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.encoder.layer.0.attention.self.query.bias"] = torch.ones(32)


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (drop_one, "lacks the tensor .*lora_B.weight"),
        (rename_layer, "question, which is no layer of BertModel"),
        (widen, r"by \[40, 32\], and its weight is \[32, 32\]"),
        (add_bias, "cannot merge: .*query.bias"),
        (dict.clear, "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    damage: Callable[[dict[str, torch.Tensor]], None], refusal: str, bert: Path
) -> None:
    path = bert / "law" / "adapter_model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)

    with pytest.raises(ModelUnavailable, match=refusal):
        load_tiny(bert, settings=TaskSettings(adapter="law"))


def test_a_missing_tensor_of_a_network_with_adapters_is_named(jina_v3: Path, tmp_path: Path) -> None:
    for file in jina_v3.rglob("*"):
        if file.is_file():
            copy = tmp_path / file.relative_to(jina_v3)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.original"]
    save_file(tensors, path, {"format": "pt"})

    with pytest.raises(ModelUnavailable, match=r"missing: layers\.1\.mlp\.fc1\.weight"):
        load_tiny(tmp_path)
