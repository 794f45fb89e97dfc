"""Rerankers and embedders on a Llama that attends in both directions, against a computation by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaModel

from backends.contract import Embed, EmbedReply, Operation, RerankReply, Score, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import DTypeName, RerankPrompt, TaskSettings
from tests.engine.checkpoints import DECODER
from tests.engine.engines import TEXTS, engine_on, load_tiny, run_work
from tests.engine.vocabularies import write_llama3

PAIRS = tuple((TEXTS[0], document) for document in TEXTS[1:9])
PUBLISHED = TaskSettings(model="nvidia/llama-nemotron-rerank-1b-v2")
TEMPERATURE = 0.2
CODE = "llama_bidirectional_model.LlamaBidirectional"
CONFIG = {
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "auto_map": {
        "AutoConfig": f"{CODE}Config",
        "AutoModel": f"{CODE}Model",
        "AutoModelForSequenceClassification": f"{CODE}ForSequenceClassification",
    },
    "model_type": "llama_bidirec",
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "pooling": "avg",
    "temperature": TEMPERATURE,
    "max_position_embeddings": 4000,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 500,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def llama(folder: Path) -> tuple[LlamaModel, torch.Tensor]:
    """Write a reranker with the published keys; return its network and the weights of its classifier."""
    size = write_llama3(folder, TEXTS)
    keys = DECODER | CONFIG | {"vocab_size": size, "head_dim": 8, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(keys))
    torch.manual_seed(0)
    config = LlamaConfig(
        **{name: value for name, value in keys.items() if name not in {"auto_map", "model_type"}}
    )
    network = LlamaModel(config).eval()
    score = torch.randn(1, config.hidden_size)
    weights = {f"model.{name}": value for name, value in network.state_dict().items()} | {
        "score.weight": score
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return network, score


@torch.inference_mode()
def hidden(network: LlamaModel, ids: list[int]) -> torch.Tensor:
    """Return the vectors (tokens, dim) of tokens that attend in both directions."""
    everything = torch.zeros(1, 1, len(ids), len(ids))
    return network(torch.tensor([ids]), attention_mask=everything).last_hidden_state[0]


def score_by_card(folder: Path, network: LlamaModel, score: torch.Tensor) -> Vectors:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(f"question:{query} \n \n passage:{document}")["input_ids"] for query, document in PAIRS]
    pooled = [hidden(network, ids).mean(dim=0) for ids in rows]
    return np.array([float(score[0] @ vector) / TEMPERATURE for vector in pooled])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_scores_equal_those_of_the_model_card(dtype: DTypeName, tmp_path: Path) -> None:
    network, score = llama(tmp_path)
    model = load_tiny(tmp_path, dtype, PUBLISHED)

    reply = await run_work(engine_on(model), Score(PAIRS, raw_scores=True), RerankReply)

    expected = score_by_card(tmp_path, network, score)
    close = 1e-4 if dtype == "float32" else 0.02
    np.testing.assert_allclose(reply.scores, expected, atol=close * np.abs(expected).max())
    assert expected.std() > 0.1
    assert model.packed
    assert Operation.RERANK in model.capabilities.operations


async def test_own_code_is_not_run(tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / "llama_bidirectional_model.py").write_text("raise SystemExit")

    trusted = load_tiny(tmp_path, settings=PUBLISHED, trust_remote_code=True)

    assert trusted.packed


async def test_embeds_without_own_code(tmp_path: Path) -> None:
    network, _ = llama(tmp_path)

    model = load_tiny(tmp_path, settings=TaskSettings(pooling="mean"))

    reply = await run_work(engine_on(model), Embed(tuple(TEXTS[:8])), EmbedReply)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pooled = [hidden(network, tokenizer(text)["input_ids"]).mean(dim=0).numpy() for text in TEXTS[:8]]
    expected = np.stack([vector / np.linalg.norm(vector) for vector in pooled])
    np.testing.assert_allclose(reply.vectors, expected, atol=1e-5)


def test_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    llama(tmp_path)
    with pytest.raises(ModelUnavailable, match="do not state the prompt"):
        load_tiny(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pooling": "weighted"}))
    with pytest.raises(ModelUnavailable, match="'weighted'; known are: avg, cls, last"):
        load_tiny(tmp_path, settings=TaskSettings(rerank_template=RerankPrompt("{query}{document}")))
