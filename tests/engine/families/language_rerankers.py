"""Rerankers that are language models: each reads a query and a document in a prompt of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaModel

from backends.contract import Score, Vectors
from backends.recipe.options import TaskSettings
from tests.engine.families.decoders import DECODER, GEMMA2, QWEN2, QWEN3, QWEN_TOKENIZER
from tests.engine.families.family import Answer, Family, Json, Refused, Served
from tests.engine.families.references import PAIRS
from tests.engine.families.rerankers import ONE_LABEL
from tests.engine.families.vocabularies import GEMMA, LLAMA_3, QWEN
from tests.engine.rerank_cards import Ids, bge_ids, mxbai_ids, qwen3_ids, score_by_card

QWEN3_RERANKER: Json = QWEN3 | {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 40960,
}
MXBAI: Json = QWEN2 | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
BGE_GEMMA: Json = DECODER | {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rope_theta": 10000.0,
}
CODE = "llama_bidirectional_model.LlamaBidirectional"
NEMOTRON: Json = (
    DECODER
    | ONE_LABEL
    | {
        "architectures": ["LlamaBidirectionalForSequenceClassification"],
        "attention_bias": False,
        "auto_map": {
            "AutoConfig": f"{CODE}Config",
            "AutoModel": f"{CODE}Model",
            "AutoModelForSequenceClassification": f"{CODE}ForSequenceClassification",
        },
        "head_dim": 8,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama_bidirec",
        "pooling": "avg",
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "temperature": 1.0,
        "tie_word_embeddings": True,
    }
)
GEMMA_TOKENIZER: Json = {
    "add_bos_token": True,
    "add_eos_token": False,
    "model_max_length": 1000000000000000019884624838656,
    "tokenizer_class": "GemmaTokenizer",
}


def answer_of(logits: Vectors) -> Sequence[Answer]:
    return [Answer(Score(PAIRS), 1 / (1 + np.exp(-logits)))]


def next_token_scores(
    ids: Callable[[Path, str, str], Ids], *answers: str
) -> Callable[[Path], Sequence[Answer]]:
    """Score pairs by the logits of the tokens that answer. ids: of a pair in its prompt."""

    def score(folder: Path) -> Sequence[Answer]:
        rows = [ids(folder, query, document) for query, document in PAIRS]
        return answer_of(score_by_card(folder, rows, answers))

    return score


def converted_scores(folder: Path) -> Sequence[Answer]:
    """Score pairs with transformers' classifier in the prompt of Qwen3-Reranker."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [qwen3_ids(folder, query, document) for query, document in PAIRS]
    with torch.no_grad():
        return answer_of(np.array([float(model(torch.tensor([row])).logits[0, 0]) for row in rows]))


def nemotron_scores(folder: Path) -> Sequence[Answer]:
    """Score pairs with a Llama without a causal mask, the average of its token vectors, and a layer."""
    keys = {name: value for name, value in NEMOTRON.items() if name not in {"auto_map", "model_type"}}
    weights = load_file(folder / "model.safetensors")
    config = LlamaConfig(**keys, vocab_size=len(weights["model.embed_tokens.weight"]))
    network = LlamaModel(config).eval()
    score = weights.pop("score.weight")
    network.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(f"question:{query} \n \n passage:{document}")["input_ids"] for query, document in PAIRS]
    with torch.no_grad():
        masks = [torch.zeros(1, 1, len(row), len(row)) for row in rows]
        vectors = [
            network(torch.tensor([row]), attention_mask=mask).last_hidden_state[0]
            for row, mask in zip(rows, masks, strict=True)
        ]
    return answer_of(np.array([float(score[0] @ row.mean(dim=0)) for row in vectors]))


FAMILIES = (
    Family(
        name="qwen3-reranker",
        checkpoints=("Qwen/Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-Reranker-8B"),
        kind="language",
        state=Served(),
        network="Qwen3ForCausalLM",
        config=QWEN3_RERANKER,
        vocabulary=QWEN,
        tokenizer_config=QWEN_TOKENIZER,
        reference=next_token_scores(qwen3_ids, "yes", "no"),
        settings=TaskSettings(model="Qwen/Qwen3-Reranker-0.6B"),
        notes="a copy under another name: `rerank_template: qwen3`",
    ),
    Family(
        name="qwen3-reranker-seq-cls",
        checkpoints=(
            "tomaarsen/Qwen3-Reranker-0.6B-seq-cls",
            "tomaarsen/Qwen3-Reranker-4B-seq-cls",
            "tomaarsen/Qwen3-Reranker-8B-seq-cls",
        ),
        kind="classifier",
        state=Served(),
        network="Qwen3ForSequenceClassification",
        config=QWEN3_RERANKER
        | ONE_LABEL
        | {"architectures": ["Qwen3ForSequenceClassification"], "pad_token_id": 0},
        vocabulary=QWEN,
        tokenizer_config=QWEN_TOKENIZER,
        reference=converted_scores,
        settings=TaskSettings(model="tomaarsen/Qwen3-Reranker-0.6B-seq-cls"),
        notes="a copy under another name: `rerank_template: qwen3`",
    ),
    Family(
        name="mxbai-rerank-v2",
        checkpoints=("mixedbread-ai/mxbai-rerank-base-v2", "mixedbread-ai/mxbai-rerank-large-v2"),
        kind="language",
        state=Served(),
        network="Qwen2ForCausalLM",
        config=MXBAI,
        vocabulary=QWEN,
        tokenizer_config=QWEN_TOKENIZER | {"model_max_length": 32768},
        reference=next_token_scores(mxbai_ids, "1", "0"),
        settings=TaskSettings(model="mixedbread-ai/mxbai-rerank-base-v2"),
        notes="a copy under another name: `rerank_template: mxbai-v2`",
    ),
    Family(
        name="bge-reranker-v2-gemma",
        checkpoints=("BAAI/bge-reranker-v2-gemma",),
        kind="language",
        state=Served(),
        network="GemmaForCausalLM",
        config=BGE_GEMMA,
        vocabulary=GEMMA,
        tokenizer_config=GEMMA_TOKENIZER,
        reference=next_token_scores(bge_ids, "Yes"),
        settings=TaskSettings(model="BAAI/bge-reranker-v2-gemma"),
        notes="a copy under another name: `rerank_template: bge-gemma`",
    ),
    Family(
        name="llama-nemotron-rerank",
        checkpoints=("nvidia/llama-nemotron-rerank-1b-v2", "nvidia/llama-3.2-nv-rerankqa-1b-v2"),
        kind="classifier",
        state=Served(),
        network="LlamaForSequenceClassification",
        config=NEMOTRON,
        vocabulary=LLAMA_3,
        tokenizer_config={"model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast"},
        reference=nemotron_scores,
        settings=TaskSettings(model="nvidia/llama-nemotron-rerank-1b-v2"),
        notes="a copy under another name: `rerank_template: nemotron`",
    ),
    Family(
        name="jina-reranker-v3",
        checkpoints=("jinaai/jina-reranker-v3",),
        kind="listwise",
        state=Refused("scores all documents of a query in one pass", "all documents of a query in one pass"),
        network="",
        config=QWEN3
        | {"architectures": ["JinaForRanking"], "auto_map": {"AutoModel": "modeling.JinaForRanking"}},
        vocabulary=QWEN,
    ),
    Family(
        name="jina-reranker-m0",
        checkpoints=("jinaai/jina-reranker-m0",),
        kind="images",
        state=Refused("reads images", "images as well as text"),
        network="",
        config=QWEN2 | {"architectures": ["JinaVLForRanking"], "model_type": "qwen2_vl"},
        vocabulary=QWEN,
    ),
    Family(
        name="bge-reranker-v2-minicpm-layerwise",
        checkpoints=("BAAI/bge-reranker-v2-minicpm-layerwise",),
        kind="layerwise",
        state=Refused("a scoring head in each of its upper layers", "scoring head in each"),
        network="",
        config=DECODER
        | {
            "architectures": ["LayerWiseMiniCPMForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_minicpm_reranker.LayerWiseMiniCPMConfig",
                "AutoModelForCausalLM": "modeling_minicpm_reranker.LayerWiseMiniCPMForCausalLM",
            },
            "max_position_embeddings": 2048,
            "model_type": "minicpm",
            "start_layer": 8,
        },
        vocabulary=QWEN,
    ),
    Family(
        name="bge-reranker-v2.5-gemma2-lightweight",
        checkpoints=("BAAI/bge-reranker-v2.5-gemma2-lightweight",),
        kind="layerwise",
        state=Refused("drops tokens between its layers", "drops tokens"),
        network="",
        config=GEMMA2 | {"architectures": ["CostWiseGemmaForCausalLM"], "model_type": "cost_wise_gemma"},
        vocabulary=GEMMA,
    ),
)
