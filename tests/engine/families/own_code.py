"""Models whose network is code that comes with the checkpoint, or from a repository that it names."""

from tests.engine.families.bert import TOKENIZER as BERT_TOKENIZER
from tests.engine.families.family import Family, Json, NeedsTrustedCode
from tests.engine.families.layout import SIZES, dense_config, sentence_files
from tests.engine.families.modernbert import NOMIC
from tests.engine.families.roberta import LONG_XLM_TOKENIZER
from tests.engine.families.vocabularies import BERT, LLAMA_2, QWEN, XLM_ROBERTA

NEW_CODE = "Alibaba-NLP/new-impl--"
NEW: Json = SIZES | {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{NEW_CODE}configuration.NewConfig",
        "AutoModel": f"{NEW_CODE}modeling.NewModel",
        "AutoModelForMaskedLM": f"{NEW_CODE}modeling.NewForMaskedLM",
        "AutoModelForMultipleChoice": f"{NEW_CODE}modeling.NewForMultipleChoice",
        "AutoModelForQuestionAnswering": f"{NEW_CODE}modeling.NewForQuestionAnswering",
        "AutoModelForSequenceClassification": f"{NEW_CODE}modeling.NewForSequenceClassification",
        "AutoModelForTokenClassification": f"{NEW_CODE}modeling.NewForTokenClassification",
    },
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500000,
    "type_vocab_size": 0,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
LONG_BERT_TOKENIZER = BERT_TOKENIZER | {"model_max_length": 8192}
CODE_ELSEWHERE = "`trust_remote_code: true`; the code is in another repository"


def with_experts(name: str) -> str:
    """Return the published name of a tensor: every second layer has experts."""
    return name.replace("layers.1.mlp.fc1", "layers.1.mlp.experts.mlp.w").replace(
        "layers.1.mlp", "layers.1.mlp.experts.mlp"
    )


FAMILIES = (
    Family(
        name="nomic-embed-moe",
        checkpoints=("nomic-ai/nomic-embed-text-v2-moe",),
        kind="dense",
        state=NeedsTrustedCode(),
        network="NomicBertModel",
        config=NOMIC
        | {
            "activation_function": "gelu",
            "expert_choice_router": False,
            "ffn_div": 1.0,
            "mlp_fc1_bias": True,
            "mlp_fc2_bias": True,
            "moe_every_n_layers": 2,
            "moe_impl": "megablocks",
            "moe_normalize_expert_weights": False,
            "moe_resid_pdrop": 0.0,
            "moe_top_k": 2,
            "n_positions": 2048,
            "num_experts": 8,
            "num_shared_experts": 0,
            "qkv_proj_bias": True,
            "router_aux_loss_coef": 0.1,
            "rotary_emb_base": 10000,
        },
        rename=with_experts,
        vocabulary=XLM_ROBERTA,
        tokenizer_config=LONG_XLM_TOKENIZER,
        files=sentence_files("mean", max_seq_length=512),
        pooling="mean",
        notes="the library's `nomic_bert` has no experts",
    ),
    Family(
        name="gte-v1.5",
        checkpoints=("Alibaba-NLP/gte-base-en-v1.5", "Alibaba-NLP/gte-large-en-v1.5"),
        kind="dense",
        state=NeedsTrustedCode(),
        network="",
        config=NEW,
        vocabulary=BERT,
        tokenizer_config=LONG_BERT_TOKENIZER,
        files=sentence_files("cls", normalize=False, max_seq_length=8192),
        pooling="cls",
        notes=CODE_ELSEWHERE,
    ),
    Family(
        name="gte-multilingual",
        checkpoints=("Alibaba-NLP/gte-multilingual-base",),
        kind="dense",
        state=NeedsTrustedCode(),
        network="",
        config=NEW
        | {"architectures": ["NewForTokenClassification"], "pad_token_id": 1, "type_vocab_size": 1},
        vocabulary=XLM_ROBERTA,
        tokenizer_config=LONG_XLM_TOKENIZER,
        files=sentence_files("cls", max_seq_length=8192),
        pooling="cls",
        notes=f"{CODE_ELSEWHERE}; without: alibaba-nlp-community's",
    ),
    Family(
        name="gte-multilingual-reranker",
        checkpoints=("Alibaba-NLP/gte-multilingual-reranker-base",),
        kind="classifier",
        state=NeedsTrustedCode(),
        network="",
        config=NEW
        | {
            "architectures": ["NewForSequenceClassification"],
            "id2label": {"0": "LABEL_0"},
            "pad_token_id": 1,
        },
        vocabulary=XLM_ROBERTA,
        tokenizer_config=LONG_XLM_TOKENIZER,
        notes=CODE_ELSEWHERE,
    ),
    Family(
        name="stella-400m",
        checkpoints=("NovaSearch/stella_en_400M_v5",),
        kind="dense",
        state=NeedsTrustedCode(),
        network="",
        config=NEW
        | {
            "auto_map": {"AutoConfig": "configuration.NewConfig", "AutoModel": "modeling.NewModel"},
        },
        vocabulary=BERT,
        tokenizer_config=LONG_BERT_TOKENIZER,
        files=sentence_files("mean", normalize=False, dense=dense_config(16)),
        pooling="mean",
        notes="`trust_remote_code: true`; a `Dense` layer",
    ),
    Family(
        name="nv-embed",
        checkpoints=("nvidia/NV-Embed-v1", "nvidia/NV-Embed-v2"),
        kind="dense",
        state=NeedsTrustedCode(),
        network="",
        config={
            "architectures": ["NVEmbedModel"],
            "auto_map": {
                "AutoConfig": "configuration_nvembed.NVEmbedConfig",
                "AutoModel": "modeling_nvembed.NVEmbedModel",
            },
            "hidden_size": 32,
            "model_type": "nvembed",
        },
        vocabulary=LLAMA_2,
        tokenizer_config={"model_max_length": 32768},
        pooling="own",
    ),
    Family(
        name="jina-v4",
        checkpoints=("jinaai/jina-embeddings-v4",),
        kind="dense",
        state=NeedsTrustedCode(),
        network="",
        config={
            "architectures": ["JinaEmbeddingsV4Model"],
            "auto_map": {
                "AutoConfig": "configuration_jina_embeddings_v4.JinaEmbeddingsV4Config",
                "AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model",
            },
            "model_type": "jina_embeddings_v4",
        },
        vocabulary=QWEN,
        tokenizer_config={"model_max_length": 32768},
        pooling="own",
    ),
)
