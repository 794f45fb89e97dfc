"""Rerankers: sequence classifiers with one label, and language models that answer yes or no."""

from tests.engine.families.bert import CONFIG as BERT_CONFIG
from tests.engine.families.bert import TOKENIZER as BERT_TOKENIZER
from tests.engine.families.family import Family, Json, Served
from tests.engine.families.layout import SIZES
from tests.engine.families.modernbert import MODERNBERT
from tests.engine.families.modernbert import TOKENIZER as MODERNBERT_TOKENIZER
from tests.engine.families.references import classifier_scores
from tests.engine.families.roberta import LONG_XLM_TOKENIZER, XLM_ROBERTA, XLM_TOKENIZER
from tests.engine.families.vocabularies import BERT, DEBERTA
from tests.engine.families.vocabularies import MODERNBERT as MODERNBERT_VOCABULARY
from tests.engine.families.vocabularies import XLM_ROBERTA as XLM_VOCABULARY

ONE_LABEL: Json = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
DEBERTA_CONFIG: Json = (
    SIZES
    | ONE_LABEL
    | {
        "architectures": ["DebertaV2ForSequenceClassification"],
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": 512,
        "max_relative_positions": -1,
        "model_type": "deberta-v2",
        "norm_rel_ebd": "layer_norm",
        "pad_token_id": 0,
        "pooler_dropout": 0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": SIZES["hidden_size"],
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 256,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    }
)
XLM_CLASSIFIER = XLM_ROBERTA | ONE_LABEL | {"architectures": ["XLMRobertaForSequenceClassification"]}

FAMILIES = (
    Family(
        name="ms-marco",
        checkpoints=(
            "cross-encoder/ms-marco-MiniLM-L6-v2",
            "cross-encoder/ms-marco-MiniLM-L12-v2",
            "cross-encoder/ms-marco-TinyBERT-L2-v2",
        ),
        kind="classifier",
        state=Served(),
        network="BertForSequenceClassification",
        config=BERT_CONFIG
        | ONE_LABEL
        | {
            "architectures": ["BertForSequenceClassification"],
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        },
        vocabulary=BERT,
        tokenizer_config=BERT_TOKENIZER,
        reference=classifier_scores,
    ),
    Family(
        name="bge-reranker",
        checkpoints=("BAAI/bge-reranker-base", "BAAI/bge-reranker-large"),
        kind="classifier",
        state=Served(),
        network="XLMRobertaForSequenceClassification",
        config=XLM_CLASSIFIER,
        vocabulary=XLM_VOCABULARY,
        tokenizer_config=XLM_TOKENIZER,
        reference=classifier_scores,
    ),
    Family(
        name="bge-reranker-v2-m3",
        checkpoints=("BAAI/bge-reranker-v2-m3",),
        kind="classifier",
        state=Served(),
        network="XLMRobertaForSequenceClassification",
        config=XLM_CLASSIFIER | {"max_position_embeddings": 8194},
        vocabulary=XLM_VOCABULARY,
        tokenizer_config=LONG_XLM_TOKENIZER,
        reference=classifier_scores,
    ),
    Family(
        name="mxbai-rerank-v1",
        checkpoints=(
            "mixedbread-ai/mxbai-rerank-xsmall-v1",
            "mixedbread-ai/mxbai-rerank-base-v1",
            "mixedbread-ai/mxbai-rerank-large-v1",
        ),
        kind="classifier",
        state=Served(packed=False),
        network="DebertaV2ForSequenceClassification",
        config=DEBERTA_CONFIG,
        vocabulary=DEBERTA,
        tokenizer_config={
            "do_lower_case": False,
            "model_max_length": 512,
            "split_by_punct": False,
            "tokenizer_class": "DebertaV2Tokenizer",
            "vocab_type": "spm",
        },
        reference=classifier_scores,
    ),
    Family(
        name="gte-reranker-modernbert",
        checkpoints=(
            "Alibaba-NLP/gte-reranker-modernbert-base",
            "ibm-granite/granite-embedding-reranker-english-r2",
        ),
        kind="classifier",
        state=Served(),
        network="ModernBertForSequenceClassification",
        config=MODERNBERT | ONE_LABEL | {"architectures": ["ModernBertForSequenceClassification"]},
        vocabulary=MODERNBERT_VOCABULARY,
        tokenizer_config=MODERNBERT_TOKENIZER,
        reference=classifier_scores,
    ),
)
