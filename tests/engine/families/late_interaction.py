"""Models with one vector per token: ColBERT's layouts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from sentence_transformers import MultiVectorEncoder

from backends.contract import Encode, Output
from tests.engine.families.bert import CONFIG as BERT_CONFIG
from tests.engine.families.bert import TOKENIZER as BERT_TOKENIZER
from tests.engine.families.family import Answer, Family, Json, Served
from tests.engine.families.layout import HIDDEN, IDENTITY, Files
from tests.engine.families.modernbert import MODERNBERT
from tests.engine.families.modernbert import TOKENIZER as MODERNBERT_TOKENIZER
from tests.engine.families.references import TEXTS
from tests.engine.families.vocabularies import BERT
from tests.engine.families.vocabularies import MODERNBERT as MODERNBERT_VOCABULARY

METADATA: Json = {
    "attend_to_mask_tokens": False,
    "dim": 16,
    "doc_maxlen": 180,
    "doc_token": "[unused1]",
    "doc_token_id": "[D]",
    "mask_punctuation": True,
    "query_maxlen": 32,
    "query_token": "[unused0]",
    "query_token_id": "[Q]",
    "similarity": "cosine",
}
PYLATE: Json = {
    "__version__": {"pytorch": "2.5.1", "sentence_transformers": "4.0.2", "transformers": "4.48.2"},
    "attend_to_expansion_tokens": False,
    "default_prompt_name": None,
    "document_length": 300,
    "document_prefix": "[D] ",
    "model_type": "ColBERT",
    "prompts": {},
    "query_length": 32,
    "query_prefix": "[Q] ",
    "skiplist_words": ["!", ",", "."],
}
PYLATE_FILES: Files = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ],
    "1_Dense/config.json": {
        "activation_function": IDENTITY,
        "bias": False,
        "in_features": HIDDEN,
        "out_features": 16,
    },
    "config_sentence_transformers.json": PYLATE,
    "sentence_bert_config.json": {"do_lower_case": False, "max_seq_length": 299},
}
# PyLate adds its markers to the vocabulary.
PYLATE_VOCABULARY = replace(MODERNBERT_VOCABULARY, specials=(*MODERNBERT_VOCABULARY.specials, "[Q] ", "[D] "))


def token_vectors(folder: Path) -> Sequence[Answer]:
    """Encode queries and documents with sentence-transformers' MultiVectorEncoder."""
    model = MultiVectorEncoder(str(folder), device="cpu")
    texts, outputs = tuple(TEXTS), frozenset({Output.MULTIVECTOR})
    return [
        Answer(Encode(texts, outputs, prompt_name=name), np.concatenate([np.asarray(rows) for rows in found]))
        for name, found in (
            ("query", model.encode_query(TEXTS)),
            ("document", model.encode_document(TEXTS)),
        )
    ]


FAMILIES = (
    Family(
        name="colbert",
        checkpoints=("colbert-ir/colbertv2.0", "answerdotai/answerai-colbert-small-v1"),
        kind="multivector",
        state=Served(),
        network="BertModel",
        config=BERT_CONFIG | {"architectures": ["HF_ColBERT"]},
        rename=lambda name: f"bert.{name}",
        extra={"linear.weight": (16, HIDDEN)},
        vocabulary=BERT,
        tokenizer_config=BERT_TOKENIZER,
        files={"artifact.metadata": METADATA},
        reference=token_vectors,
    ),
    Family(
        name="pylate",
        checkpoints=(
            "lightonai/GTE-ModernColBERT-v1",
            "lightonai/Reason-ModernColBERT",
            "mixedbread-ai/mxbai-edge-colbert-v0-17m",
        ),
        kind="multivector",
        state=Served(),
        network="ModernBertModel",
        config=MODERNBERT,
        vocabulary=PYLATE_VOCABULARY,
        tokenizer_config=MODERNBERT_TOKENIZER,
        files=PYLATE_FILES,
        reference=token_vectors,
    ),
)
