"""Embedding models with an adapter (LoRA) for each task: Jina's third and fifth."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from backends.contract import Embed
from backends.recipe.options import TaskSettings
from tests.engine.families.family import Answer, Family, Json, Served
from tests.engine.families.layout import HEADS, HIDDEN, SIZES, modules, sentence_files
from tests.engine.families.lora import (
    ALPHA,
    RANK,
    TASKS,
    folder_network,
    stacked_network,
    write_folder,
    write_stacked,
)
from tests.engine.families.pages import soften
from tests.engine.families.references import TEXTS
from tests.engine.families.roberta import LONG_XLM_TOKENIZER
from tests.engine.families.vocabularies import QWEN_EMBEDDING, XLM_ROBERTA

V3_PROMPTS = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
    "separation": "",
    "classification": "",
    "text-matching": "",
}
V5_PROMPTS = {"query": "Query: ", "document": "Document: "}
FLASH_CODE = "jinaai/xlm-roberta-flash-implementation--"
V3: Json = SIZES | {
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
V3_OWN = V3 | {
    "architectures": ["XLMRobertaModel"],
    "auto_map": {
        "AutoConfig": f"{FLASH_CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": f"{FLASH_CODE}modeling_lora.XLMRobertaLoRA",
        "AutoModelForMaskedLM": f"{FLASH_CODE}modeling_xlm_roberta.XLMRobertaForMaskedLM",
    },
    "emb_pooler": None,
    "load_trained_adapters": True,
    "lora_adaptations": list(TASKS),
    "lora_alpha": ALPHA,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": RANK,
    "model_type": "xlm-roberta",
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": V3_PROMPTS,
    "truncate_dim": None,
    "use_flash_attn": True,
}
V5: Json = SIZES | {
    "architectures": ["JinaEmbeddingsV5Model"],
    "auto_map": {
        "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
        "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
    },
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 8192,
    "model_type": "jina_embeddings_v5",
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "task_names": ["retrieval", "text-matching", "clustering", "classification"],
}
V5_FILES: Mapping[str, Any] = {
    "modules.json": [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}],
    "config_sentence_transformers.json": {"prompts": V5_PROMPTS, "default_prompt_name": None},
}
V5_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted_vectors(
    network_of: Callable[[Path], torch.nn.Module], prompts: Mapping[str | None, str], folder: Path
) -> Sequence[Answer]:
    """Embed by hand. prompts: those of the requests; mean pooling, or the last token for several prompts."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    network = network_of(folder)
    answers = []
    for name, prompt in prompts.items():
        rows = []
        for text in TEXTS:
            ids = torch.tensor([tokenizer(prompt + text)["input_ids"]])
            with torch.no_grad():
                hidden = network(input_ids=ids).last_hidden_state[0]
            row = hidden[-1] if len(prompts) > 1 else hidden.mean(dim=0)
            rows.append(torch.nn.functional.normalize(row, dim=0).numpy())
        answers.append(Answer(Embed(tuple(TEXTS), prompt_name=name), np.stack(rows)))
    return answers


def plain_ids(folder: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Tokenize with transformers' class for any tokenizer.json, as the type of the model is unknown to it."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    return ids


def write_softened(network: type[Any], adapter: str, layers: Sequence[str], folder: Path) -> None:
    """Write a folder whose layers have quartered matrices.

    As made, one text in eleven differs by 0.0006 in bfloat16, another one if other operations round. Norms
    undo a scaling of the embeddings, which therefore stay.
    """
    write_folder(network, adapter, layers, folder)
    soften(folder, 0.25, but="embed_tokens")


def v5_family(name: str, size: str, network: type[Any], layers: Sequence[str]) -> Family:
    folder = "adapters/retrieval"
    requests = {None: V5_PROMPTS["document"], "query": V5_PROMPTS["query"]}
    return Family(
        name=name,
        checkpoints=(f"jinaai/jina-embeddings-v5-{size}",),
        kind="dense",
        state=Served(),
        network=network.__name__,
        config=V5 | {"is_decoder": network is transformers.Qwen3Model},
        vocabulary=QWEN_EMBEDDING,
        tokenizer_config={"model_max_length": 8192},
        files=V5_FILES,
        write=partial(write_softened, network, folder, layers),
        reference=partial(adapted_vectors, partial(folder_network, network, folder), requests),
        token_ids=plain_ids,
        pooling="last token",
        settings=TaskSettings(adapter="retrieval"),
        notes="`adapter: retrieval`, or another task",
    )


V3_NETWORK = transformers.JinaEmbeddingsV3Model
QUERIES = {None: V3_PROMPTS["retrieval.query"]}
FAMILIES = (
    Family(
        name="jina-v3",
        checkpoints=("jinaai/jina-embeddings-v3",),
        kind="dense",
        state=Served(),
        network="",
        config=V3_OWN,
        vocabulary=XLM_ROBERTA,
        tokenizer_config=LONG_XLM_TOKENIZER,
        files=sentence_files("mean", max_seq_length=None, prompts=V3_PROMPTS)
        | {
            "modules.json": [
                {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"},
                *modules("Transformer", "Pooling", "Normalize")[1:],
            ]
        },
        write=write_stacked,
        reference=partial(adapted_vectors, stacked_network, QUERIES),
        pooling="mean",
        settings=TaskSettings(adapter="retrieval.query"),
        notes="`adapter: retrieval.query`, or another task; without: no adapter",
    ),
    Family(
        name="jina-v3-hf",
        checkpoints=("jinaai/jina-embeddings-v3-hf",),
        kind="dense",
        state=Served(),
        network="JinaEmbeddingsV3Model",
        config=V3 | {"architectures": ["JinaEmbeddingsV3Model"], "model_type": "jina_embeddings_v3"},
        vocabulary=XLM_ROBERTA,
        tokenizer_config=LONG_XLM_TOKENIZER,
        files=sentence_files("mean", max_seq_length=None, prompts=V3_PROMPTS),
        write=partial(write_folder, V3_NETWORK, "retrieval_query", ("fc1", "fc2", "q_proj", "o_proj")),
        reference=partial(adapted_vectors, partial(folder_network, V3_NETWORK, "retrieval_query"), QUERIES),
        pooling="mean",
        settings=TaskSettings(adapter="retrieval.query"),
        notes="`adapter: retrieval.query`, or another task; without: no adapter",
    ),
    v5_family("jina-v5", "text-small", transformers.Qwen3Model, V5_LAYERS),
    v5_family("jina-v5-nano", "text-nano", transformers.EuroBertModel, ("v_proj", "down_proj")),
)
