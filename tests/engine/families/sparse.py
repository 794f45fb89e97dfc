"""Models with term weights, and models of late interaction."""

from backends.torch.options import TaskSettings
from tests.engine.families.bert import CONFIG as BERT_CONFIG
from tests.engine.families.bert import TOKENIZER as BERT_TOKENIZER
from tests.engine.families.family import Family, Served
from tests.engine.families.layout import Files
from tests.engine.families.references import sparse_weights
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

FAMILIES = (
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
