"""Models with term weights, and models of late interaction."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from backends.recipe.options import TaskSettings
from tests.engine.families.bert import CONFIG as BERT_CONFIG
from tests.engine.families.bert import DISTILBERT
from tests.engine.families.bert import TOKENIZER as BERT_TOKENIZER
from tests.engine.families.family import Family, Served
from tests.engine.families.layout import Files
from tests.engine.families.references import routed_weights, sparse_weights
from tests.engine.families.vocabularies import BERT

MASKED = BERT_CONFIG | {"architectures": ["BertForMaskedLM"]}
SPLADE_FILES: Files = {
    "modules.json": [
        {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.sparse_encoder.models.MLMTransformer",
        },
        {
            "idx": 1,
            "name": "1",
            "path": "1_SpladePooling",
            "type": "sentence_transformers.sparse_encoder.models.SpladePooling",
        },
    ],
    "1_SpladePooling/config.json": {
        "pooling_strategy": "max",
        "activation_function": "relu",
        "word_embedding_dimension": None,
    },
    "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
    "config_sentence_transformers.json": {
        "model_type": "SparseEncoder",
        "prompts": {"query": "", "document": ""},
    },
}

SPARSE_MODULES = "sentence_transformers.sparse_encoder.models"
TABLE_FOLDER = "query_0_SparseStaticEmbedding"
ROUTER_FILES: Files = {
    "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}],
    "router_config.json": {
        "types": {
            TABLE_FOLDER: f"{SPARSE_MODULES}.SparseStaticEmbedding.SparseStaticEmbedding",
            "": f"{SPARSE_MODULES}.MLMTransformer.MLMTransformer",
            "document_1_SpladePooling": f"{SPARSE_MODULES}.SpladePooling.SpladePooling",
        },
        "structure": {"query": [TABLE_FOLDER], "document": ["", "document_1_SpladePooling"]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    },
    f"{TABLE_FOLDER}/config.json": {"frozen": True},
    "document_1_SpladePooling/config.json": {
        "pooling_strategy": "max",
        "activation_function": "log1p_relu",
        "word_embedding_dimension": None,
    },
    "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
    "config_sentence_transformers.json": {
        "model_type": "SparseEncoder",
        "prompts": {"query": "", "document": ""},
    },
}


def write_table(folder: Path) -> None:
    """Write the weights of queries' terms, with a copy of the tokenizer."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    save_file({"weight": torch.rand(size) * 5}, folder / TABLE_FOLDER / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, folder / TABLE_FOLDER / name)


FAMILIES = (
    Family(
        name="opensearch-doc-v3",
        checkpoints=("opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill",),
        kind="sparse",
        state=Served(),
        network="DistilBertForMaskedLM",
        config=DISTILBERT | {"architectures": ["DistilBertForMaskedLM"]},
        vocabulary=BERT,
        tokenizer_config=BERT_TOKENIZER,
        files=ROUTER_FILES,
        write=write_table,
        reference=routed_weights,
        pooling="splade",
        notes="queries pass no network: name the role",
    ),
    Family(
        name="splade-v3",
        checkpoints=("naver/splade-v3",),
        kind="sparse",
        state=Served(),
        network="BertForMaskedLM",
        config=MASKED,
        vocabulary=BERT,
        tokenizer_config=BERT_TOKENIZER,
        files=SPLADE_FILES,
        reference=sparse_weights,
        pooling="splade",
    ),
    Family(
        name="splade-cocondenser",
        checkpoints=("naver/splade-cocondenser-ensembledistil", "naver/splade_v2_distil"),
        kind="sparse",
        state=Served(),
        network="BertForMaskedLM",
        config=MASKED,
        vocabulary=BERT,
        tokenizer_config=BERT_TOKENIZER,
        reference=sparse_weights,
        pooling="splade",
        settings=TaskSettings(pooling="splade"),
        notes="`pooling: splade`",
    ),
)
