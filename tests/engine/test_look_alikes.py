"""Checkpoints whose `model_type` transformers knows, and whose layers are those of code of their own.

Each has the names of the published model's tensors at a small size. transformers builds its own network of
that type and fills what it does not find with random numbers, so that each must be refused by its weights,
also if its config does not name the code.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from backends.contract.errors import ModelUnavailable
from backends.recipe.options import TaskSettings
from tests.engine.checkpoints import SMALL, make_encoder
from tests.engine.engines import load_tiny

WIDTH, INNER = SMALL["hidden_size"], SMALL["intermediate_size"]
LAYERS = range(SMALL["num_hidden_layers"])
Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (out, inputs), f"{name}.bias": (out,)}


def norm(name: str) -> Shapes:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def embeddings(prefix: str = "") -> Shapes:
    return {f"{prefix}embeddings.word_embeddings.weight": (SMALL["vocab_size"], WIDTH)}


def jina_bert() -> Shapes:
    """Return the tensors of jina-embeddings-v2: ALiBi instead of positions, gated feed-forward."""
    shapes = {
        **embeddings(),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        **norm("embeddings.LayerNorm"),
        **linear("pooler.dense", WIDTH, WIDTH),
    }
    for layer in LAYERS:
        at = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes |= linear(f"{at}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= linear(f"{at}.attention.output.dense", WIDTH, WIDTH) | norm(
            f"{at}.attention.output.LayerNorm"
        )
        shapes |= {f"{at}.mlp.gated_layers.weight": (2 * INNER, WIDTH)}
        shapes |= linear(f"{at}.mlp.wo", WIDTH, INNER) | norm(f"{at}.mlp.layernorm")
    return shapes


def flash_roberta(prefix: str = "", weight: str = "weight") -> Shapes:
    """Return the tensors of Jina's XLM-RoBERTa with joined attention: v3, ColBERT v2 and reranker v2."""
    shapes = {
        **embeddings(prefix),
        f"{prefix}embeddings.token_type_embeddings.weight": (1, WIDTH),
        **norm(f"{prefix}emb_ln"),
    }
    for layer in LAYERS:
        at = f"{prefix}encoder.layers.{layer}"
        for part, out, inputs in (
            ("mixer.Wqkv", 3 * WIDTH, WIDTH),
            ("mixer.out_proj", WIDTH, WIDTH),
            ("mlp.fc1", INNER, WIDTH),
            ("mlp.fc2", WIDTH, INNER),
        ):
            shapes |= {f"{at}.{part}.{weight}": (out, inputs), f"{at}.{part}.bias": (out,)}
        shapes |= norm(f"{at}.norm1") | norm(f"{at}.norm2")
    return shapes


def nomic_mixture() -> Shapes:
    """Return the tensors of nomic-embed-text-v2-moe: every second layer has experts."""
    shapes = {
        **embeddings(),
        "embeddings.token_type_embeddings.weight": (1, WIDTH),
        **norm("emb_ln"),
    }
    for layer in LAYERS:
        at = f"encoder.layers.{layer}"
        shapes |= linear(f"{at}.attn.Wqkv", 3 * WIDTH, WIDTH) | linear(f"{at}.attn.out_proj", WIDTH, WIDTH)
        shapes |= norm(f"{at}.norm1") | norm(f"{at}.norm2")
        if layer % 2:
            shapes |= {
                f"{at}.mlp.router.layer.weight": (8, WIDTH),
                f"{at}.mlp.experts.bias": (WIDTH,),
                f"{at}.mlp.experts.mlp.w1": (8 * INNER, WIDTH),
                f"{at}.mlp.experts.mlp.w2": (8 * INNER, WIDTH),
            }
        else:
            shapes |= linear(f"{at}.mlp.fc1", INNER, WIDTH) | linear(f"{at}.mlp.fc2", WIDTH, INNER)
    return shapes


def bert() -> PretrainedConfig:
    return transformers.BertConfig(**SMALL)


def roberta() -> PretrainedConfig:
    return transformers.XLMRobertaConfig(**SMALL | {"type_vocab_size": 1, "pad_token_id": 1})


# Name of the published model → its config's class, architecture, tensors, and a tensor that the error names.
MODELS: dict[str, tuple[Callable[[], PretrainedConfig], str, Callable[[], Shapes], str]] = {
    "jina-embeddings-v2": (bert, "JinaBertForMaskedLM", jina_bert, "intermediate.dense"),
    "jina-embeddings-v3": (
        roberta,
        "XLMRobertaModel",
        lambda: flash_roberta("roberta.", "parametrizations.weight.original"),
        "embeddings.LayerNorm",
    ),
    "jina-colbert-v2": (
        roberta,
        "HF_ColBERT",
        lambda: flash_roberta("roberta.") | {"linear.weight": (16, WIDTH)},
        "embeddings.LayerNorm",
    ),
    "jina-reranker-v2": (
        roberta,
        "XLMRobertaForSequenceClassification",
        lambda: (
            flash_roberta("roberta.")
            | linear("classifier.dense", WIDTH, WIDTH)
            | linear("classifier.out_proj", 1, WIDTH)
        ),
        "embeddings.LayerNorm",
    ),
    "nomic-embed-text-v2-moe": (
        lambda: transformers.NomicBertConfig(**SMALL),
        "NomicBertModel",
        nomic_mixture,
        "mlp",
    ),
}


def write_look_alike(model: str, minilm: Path, folder: Path) -> Path:
    """Write the config, tokenizer and tensors of a published model at a small size."""
    config, architecture, shapes, _ = MODELS[model]
    make_encoder(config(), minilm, folder)
    stored = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(stored | labels | {"architectures": [architecture]}))
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {
        name: torch.randn(shape, generator=generator) for name, shape in shapes().items()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_a_network_of_other_code_is_refused_by_its_weights(model: str, minilm: Path, tmp_path: Path) -> None:
    folder = write_look_alike(model, minilm, tmp_path)

    with pytest.raises(ModelUnavailable, match="missing: ") as refusal:
        load_tiny(folder)

    assert MODELS[model][3] in refusal.value.message


@pytest.mark.parametrize("model", ["jina-embeddings-v2", "jina-embeddings-v3"])
def test_settings_do_not_lift_the_refusal(model: str, minilm: Path, tmp_path: Path) -> None:
    folder = write_look_alike(model, minilm, tmp_path)

    with pytest.raises(ModelUnavailable, match="missing: "):
        load_tiny(folder, settings=TaskSettings("embed", "mean"))
