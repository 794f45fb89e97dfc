"""Networks of BERT's family against transformers' classes: the same bits from the same files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from backends.contract import Output, Truncate
from backends.recipe.bert_config import read_bert
from backends.recipe.files import CheckpointFiles
from backends.recipe.options import DTypeName, TaskSettings
from backends.torch.inputs.sequences import LOGITS, InputSequence, Row
from backends.torch.load.load_plan import LoadOptions, plan_load
from backends.torch.load.loader import load
from backends.torch.networks.bert import open_bert
from backends.torch.networks.opening import NetworkSource, OpenedNetwork, Placement
from backends.torch.stock.construction import open_stock
from tests.engine.checkpoints import SMALL, make_classifier, make_encoder, make_language_model
from tests.engine.engines import TEXTS
from tests.waiting import PATIENCE_S

OFFSET = SMALL | {"pad_token_id": 1}
CONFIGS: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "bert": lambda **other: transformers.BertConfig(**SMALL | other),
    "roberta": lambda **other: transformers.RobertaConfig(**OFFSET | other),
    "xlm-roberta": lambda **other: transformers.XLMRobertaConfig(**OFFSET | {"type_vocab_size": 1} | other),
    "camembert": lambda **other: transformers.CamembertConfig(**OFFSET | {"type_vocab_size": 1} | other),
}
KINDS = ("dense", "classifier", "sparse")


def write(kind: str, config: transformers.PretrainedConfig, minilm: Path, folder: Path) -> Path:
    if kind == "sparse":
        return make_language_model(config, minilm, folder, transformers.AutoModelForMaskedLM)
    if kind == "classifier":
        return make_classifier(config, minilm, folder, labels=3)
    return make_encoder(config, minilm, folder)


def source_of(folder: Path, kind: str) -> NetworkSource:
    settings = TaskSettings(pooling="splade") if kind == "sparse" else TaskSettings()
    plan = plan_load(folder, LoadOptions(settings=settings))
    return NetworkSource(folder, plan.recipe, plan.tokenizer, plan.template)


def opened_both_ways(folder: Path, kind: str, dtype: DTypeName) -> tuple[OpenedNetwork, OpenedNetwork]:
    source = source_of(folder, kind)
    placement = Placement(getattr(torch, dtype), torch.device("cpu"))
    own = open_bert(source, placement, CheckpointFiles(folder).config)
    assert own is not None
    return own, open_stock(source, placement)


def rows_of(network: OpenedNetwork, source: NetworkSource) -> list[Row]:
    inputs = [*TEXTS[:6], (TEXTS[0], TEXTS[1])]
    encoded = source.tokenizer.encode(inputs, Truncate.RIGHT)
    sequences = [InputSequence(*row) for row in zip(encoded.ids, encoded.type_ids, strict=True)]
    # A query's fillers, to which no token attends.
    sequences.append(InputSequence(sequences[0].ids, sequences[0].type_ids, attended_tokens=4))
    return network.head.run(sequences, network.outputs or LOGITS)


def assert_same(own: OpenedNetwork, stock: OpenedNetwork, source: NetworkSource) -> None:
    assert (own.packed, own.outputs, own.reentrant) == (stock.packed, stock.outputs, stock.reentrant)
    for row, expected in zip(rows_of(own, source), rows_of(stock, source), strict=True):
        for name in ("dense", "multivector", "token_vectors"):
            found, wanted = getattr(row, name), getattr(expected, name)
            assert (found is None) == (wanted is None)
            if found is not None:
                np.testing.assert_array_equal(found, wanted)
        if expected.terms is not None:
            assert row.terms is not None
            np.testing.assert_array_equal(row.terms.indices, expected.terms.indices)
            np.testing.assert_array_equal(row.terms.values, expected.terms.values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_network_gives_the_numbers_of_transformers(
    model_type: str, kind: str, dtype: DTypeName, minilm: Path, tmp_path: Path
) -> None:
    folder = write(kind, CONFIGS[model_type](), minilm, tmp_path)

    assert_same(*opened_both_ways(folder, kind, dtype), source_of(folder, kind))


@pytest.mark.parametrize("activation", ["relu", "silu", "swish", "tanh"])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_an_activation_is_that_of_transformers(
    kind: str, activation: str, minilm: Path, tmp_path: Path
) -> None:
    folder = write(kind, CONFIGS["bert"](hidden_act=activation), minilm, tmp_path)

    assert_same(*opened_both_ways(folder, kind, "float32"), source_of(folder, kind))


def test_default_values_are_those_of_transformers() -> None:
    for model_type, config in CONFIGS.items():
        found, expected = read_bert({"model_type": model_type}), type(config())()
        assert found is not None
        for name in found.__struct_fields__:
            if name != "position_embedding_type":
                assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu_new"},
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"rope_theta": 10000.0},
        {"tie_word_embeddings": False},
        {"model_type": "electra"},
        {"num_attention_heads": 5},
        {"auto_map": {"AutoModel": "modeling.Model"}},
        {"output_hidden_states": True},
        {"pad_token_id": -1},
        {"pad_token_id": 30522},
        {"model_type": "roberta", "pad_token_id": None},
    ],
)
def test_other_networks_are_left_to_transformers(changes: dict[str, object]) -> None:
    config = {"model_type": "bert", **SMALL}
    assert read_bert(config) is not None

    assert read_bert(config | changes) is None


def rename(folder: Path, change: Callable[[str], str]) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(
        {change(name): value for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name,
        lambda name: f"bert.{name}",
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ),
    ],
    ids=["as saved", "of a network with a head", "of TensorFlow"],
)
def test_tensors_are_found_under_their_names(
    change: Callable[[str], str], minilm: Path, tmp_path: Path
) -> None:
    folder = make_encoder(CONFIGS["bert"](), minilm, tmp_path)
    rename(folder, change)

    assert_same(*opened_both_ways(folder, "dense", "float32"), source_of(folder, "dense"))


@pytest.mark.parametrize("fault", ["missing", "unexpected", "of another shape", "infinite", "untied"])
def test_files_that_are_not_the_network_are_left_to_transformers(
    fault: str, minilm: Path, tmp_path: Path
) -> None:
    kind = "sparse" if fault == "untied" else "dense"
    folder = write(kind, CONFIGS["bert"](), minilm, tmp_path)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("layer.1.output.dense.weight"))
    words = next(name for name in state if name.endswith("word_embeddings.weight"))
    changed = {
        "missing": {key: value for key, value in state.items() if key != name},
        "unexpected": {**state, "encoder.layer.3.output.dense.weight": state[name].clone()},
        "of another shape": {**state, name: state[name][:, 1:].contiguous()},
        "infinite": {**state, name: state[name] / 0},
        "untied": {**state, "cls.predictions.decoder.weight": state[words] + 1},
    }[fault]
    save_file(changed, folder / "model.safetensors", {"format": "pt"})

    placement = Placement(torch.float32, torch.device("cpu"))

    assert open_bert(source_of(folder, kind), placement, CheckpointFiles(folder).config) is None


def test_a_load_imports_neither_transformers_nor_torchs_compiler(minilm: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from backends.torch.load.loader import LoadOptions, load\n"
        f"load(Path({str(minilm)!r}), 'x', LoadOptions())\n"
        "print([name for name in ('transformers', 'torch._dynamo', 'scipy', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert done.stdout.strip() == "[]"


def test_a_late_interaction_network_is_opened_without_transformers(minilm: Path, tmp_path: Path) -> None:
    folder = make_encoder(CONFIGS["bert"](), minilm, tmp_path)
    state = load_file(folder / "model.safetensors")
    state = {f"bert.{name}": value for name, value in state.items()} | {"linear.weight": torch.randn(8, 32)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["HF_ColBERT"]}), encoding="utf-8"
    )

    own, stock = opened_both_ways(folder, "dense", "float32")

    assert own.outputs == {Output.MULTIVECTOR, Output.TOKENS}
    assert_same(own, stock, source_of(folder, "dense"))
    assert load(folder, "x", LoadOptions("float32")).packed
