"""Models whose `model_type` transformers has, while their weights belong to a different network.

Each was made by code of its own. Their tensors have the published names.
"""

import re

from tests.engine.families.bert import CONFIG as BERT_CONFIG
from tests.engine.families.bert import TOKENIZER as BERT_TOKENIZER
from tests.engine.families.family import Family, Json, NeedsTrustedCode, Served
from tests.engine.families.late_interaction import METADATA
from tests.engine.families.layout import HIDDEN, sentence_files
from tests.engine.families.modernbert import GTE
from tests.engine.families.references import sentence_vectors
from tests.engine.families.roberta import LONG_XLM_TOKENIZER, XLM_ROBERTA
from tests.engine.families.vocabularies import BERT
from tests.engine.families.vocabularies import XLM_ROBERTA as XLM_VOCABULARY

LONG_BERT_TOKENIZER = BERT_TOKENIZER | {"model_max_length": 8192}
JINA_BERT = "jinaai/jina-bert-implementation--modeling_bert.JinaBert"
JINA_BERT_CONFIG: Json = BERT_CONFIG | {
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {
        "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
        "AutoModel": f"{JINA_BERT}Model",
        "AutoModelForMaskedLM": f"{JINA_BERT}ForMaskedLM",
        "AutoModelForSequenceClassification": f"{JINA_BERT}ForSequenceClassification",
    },
    "attention_probs_dropout_prob": 0.0,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "position_embedding_type": "alibi",
}
FLASH = "jinaai/xlm-roberta-flash-implementation--"
FLASH_CONFIG: Json = XLM_ROBERTA | {
    "auto_map": {
        "AutoConfig": f"{FLASH}configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": f"{FLASH}modeling_lora.XLMRobertaLoRA",
        "AutoModelForMaskedLM": f"{FLASH}modeling_xlm_roberta.XLMRobertaForMaskedLM",
    },
    "max_position_embeddings": 8194,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "use_flash_attn": True,
}
# Tensors of BERT and XLM-RoBERTa → those of the published networks; "" for one that they do not have.
JINA_BERT_NAMES = (
    (r"embeddings\.position_embeddings.*", ""),
    (r"\.intermediate\.dense\.weight", ".mlp.gated_layers.weight"),
    (r".*\.intermediate\.dense\.bias", ""),
    (r"(layer\.\d+)\.output\.dense", r"\1.mlp.wo"),
    (r"(layer\.\d+)\.output\.LayerNorm", r"\1.mlp.layernorm"),
)
FLASH_NAMES = (
    (r"embeddings\.position_embeddings.*", ""),
    (r"embeddings\.LayerNorm", "emb_ln"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.self\.query", "mixer.Wqkv"),
    (r".*attention\.self\.(key|value).*", ""),
    (r"attention\.output\.dense", "mixer.out_proj"),
    (r"attention\.output\.LayerNorm", "norm1"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(layers\.\d+)\.output\.dense", r"\1.mlp.fc2"),
    (r"(layers\.\d+)\.output\.LayerNorm", r"\1.norm2"),
)


def renamed(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    """Return a tensor's published name."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def jina_bert_name(name: str) -> str:
    return renamed(name, JINA_BERT_NAMES)


def flash_name(name: str) -> str:
    return renamed(name, FLASH_NAMES)


FAMILIES = (
    Family(
        name="jina-v2",
        checkpoints=(
            "jinaai/jina-embeddings-v2-small-en",
            "jinaai/jina-embeddings-v2-base-en",
            "jinaai/jina-embeddings-v2-base-de",
        ),
        kind="dense",
        state=NeedsTrustedCode(),
        network="BertModel",
        config=JINA_BERT_CONFIG,
        rename=jina_bert_name,
        vocabulary=BERT,
        tokenizer_config=LONG_BERT_TOKENIZER,
        files=sentence_files("mean", normalize=False, max_seq_length=8192),
        pooling="mean",
    ),
    Family(
        name="jina-reranker-v1",
        checkpoints=("jinaai/jina-reranker-v1-turbo-en", "jinaai/jina-reranker-v1-tiny-en"),
        kind="classifier",
        state=NeedsTrustedCode(),
        network="BertForSequenceClassification",
        config=JINA_BERT_CONFIG
        | {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
        rename=jina_bert_name,
        vocabulary=BERT,
        tokenizer_config=LONG_BERT_TOKENIZER,
    ),
    Family(
        name="jina-colbert-v2",
        checkpoints=("jinaai/jina-colbert-v2",),
        kind="multivector",
        state=NeedsTrustedCode(),
        network="XLMRobertaModel",
        config=FLASH_CONFIG
        | {
            "architectures": ["HF_ColBERT"],
            "auto_map": {
                "AutoConfig": f"{FLASH}configuration_xlm_roberta.XLMRobertaFlashConfig",
                "AutoModel": f"{FLASH}modeling_xlm_roberta.XLMRobertaModel",
            },
        },
        rename=lambda name: (published := flash_name(name)) and f"roberta.{published}",
        extra={"linear.weight": (16, HIDDEN)},
        vocabulary=XLM_VOCABULARY,
        tokenizer_config=LONG_XLM_TOKENIZER,
        files={"artifact.metadata": METADATA},
    ),
    Family(
        name="jina-reranker-v2",
        checkpoints=("jinaai/jina-reranker-v2-base-multilingual",),
        kind="classifier",
        state=NeedsTrustedCode(),
        network="XLMRobertaForSequenceClassification",
        config=FLASH_CONFIG
        | {
            "architectures": ["XLMRobertaForSequenceClassification"],
            "auto_map": {
                "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
                "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
                "AutoModelForSequenceClassification": (
                    "modeling_xlm_roberta.XLMRobertaForSequenceClassification"
                ),
            },
            "id2label": {"0": "LABEL_0"},
            "max_position_embeddings": 1026,
            "position_embedding_type": "absolute",
        },
        rename=flash_name,
        vocabulary=XLM_VOCABULARY,
        tokenizer_config=LONG_XLM_TOKENIZER | {"model_max_length": 1026},
    ),
    Family(
        name="arctic-embed-m-v2",
        checkpoints=("Snowflake/snowflake-arctic-embed-m-v2.0",),
        kind="dense",
        state=Served(),
        network="GteModel",
        config=GTE
        | {
            "auto_map": {
                "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
                "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
            },
            "matryoshka_dimensions": [256],
            "rope_theta": 160000,
            "unpad_inputs": "true",
            "use_memory_efficient_attention": "true",
        },
        vocabulary=XLM_VOCABULARY,
        tokenizer_config=LONG_XLM_TOKENIZER,
        files=sentence_files("cls", max_seq_length=8192, prompts={"query": "query: "}),
        reference=sentence_vectors,
        pooling="cls",
        notes="its own network is also in transformers; no code runs",
    ),
)
