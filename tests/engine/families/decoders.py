"""Embedding models with the architectures of language models."""

from tests.engine.families.family import Family, Json, Served
from tests.engine.families.layout import HIDDEN, SIZES, dense_config, modules, sentence_files
from tests.engine.families.references import sentence_vectors
from tests.engine.families.vocabularies import EMBEDDING_GEMMA, GEMMA, QWEN, QWEN_EMBEDDING

DECODER: Json = SIZES | {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
}
QWEN3: Json = DECODER | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN2: Json = DECODER | {
    "architectures": ["Qwen2Model"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
GEMMA3: Json = DECODER | {
    "architectures": ["Gemma3TextModel"],
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 8,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
}
GEMMA2: Json = DECODER | {
    "architectures": ["Gemma2Model"],
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
QWEN_TOKENIZER: Json = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "errors": "replace",
    "model_max_length": 131072,
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
GEMMA_TOKENIZER: Json = {"model_max_length": 2048, "tokenizer_class": "GemmaTokenizer"}
QWEN3_PROMPTS = {
    "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    "document": "",
}
GEMMA_PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "BitextMining": "task: search result | query: ",
}


def without_model_prefix(name: str) -> str:
    """Return the name of a tensor in a checkpoint of the network without its language model head."""
    return name.removeprefix("model.")


FAMILIES = (
    Family(
        name="qwen3-embedding",
        checkpoints=("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-8B"),
        kind="dense",
        state=Served(),
        network="Qwen3Model",
        config=QWEN3,
        vocabulary=QWEN_EMBEDDING,
        tokenizer_config=QWEN_TOKENIZER,
        files=sentence_files(
            "lasttoken", max_seq_length=None, prompts=QWEN3_PROMPTS, pooling={"include_prompt": True}
        ),
        reference=sentence_vectors,
        pooling="last token",
        notes="the prompt `query` is in the checkpoint",
    ),
    Family(
        name="embeddinggemma",
        checkpoints=("google/embeddinggemma-300m",),
        kind="dense",
        state=Served(),
        network="Gemma3TextModel",
        config=GEMMA3,
        vocabulary=EMBEDDING_GEMMA,
        tokenizer_config=GEMMA_TOKENIZER,
        files=sentence_files("mean", max_seq_length=2048, prompts=GEMMA_PROMPTS)
        | {
            "modules.json": modules("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
            "2_Dense/config.json": dense_config(64, bias=False),
            "3_Dense/config.json": dense_config(HIDDEN, bias=False) | {"in_features": 64},
        },
        reference=sentence_vectors,
        pooling="mean",
        notes="two `Dense` layers; prompts are in the checkpoint",
    ),
    Family(
        name="bge-multilingual-gemma2",
        checkpoints=("BAAI/bge-multilingual-gemma2",),
        kind="dense",
        state=Served(packed=False),
        network="Gemma2Model",
        config=GEMMA2,
        vocabulary=GEMMA,
        tokenizer_config=GEMMA_TOKENIZER | {"model_max_length": 8192},
        files=sentence_files(
            "lasttoken", max_seq_length=8192, prompts={"web_search_query": "<instruct>a\n<query>"}
        ),
        reference=sentence_vectors,
        pooling="last token",
    ),
    Family(
        name="kalm",
        checkpoints=(
            "HIT-TMG/KaLM-embedding-multilingual-mini-v1",
            "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v1.5",
        ),
        kind="dense",
        state=Served(),
        network="Qwen2Model",
        config=QWEN2,
        vocabulary=QWEN,
        tokenizer_config=QWEN_TOKENIZER,
        files=sentence_files("mean", max_seq_length=512),
        reference=sentence_vectors,
        pooling="mean",
        notes="queries: `Instruct: …\\nQuery: ` in `prompts`",
    ),
)
