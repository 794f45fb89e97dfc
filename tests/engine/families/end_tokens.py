"""Embedding models that pool an end token which only tokenizer_config.json, or own code, asks for.

transformers 5 drops `add_eos_token` where there is a tokenizer.json, so it is no reference for them: ids are
written out here, and vectors are computed from those ids.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModel

from backends.contract import Embed
from tests.engine.families.decoders import DECODER, QWEN2, QWEN_TOKENIZER
from tests.engine.families.family import Answer, Family, Json, Served, TokenIds
from tests.engine.families.layout import sentence_files
from tests.engine.families.references import TEXTS, prompt_names
from tests.engine.families.vocabularies import LLAMA_2, QWEN

MISTRAL: Json = DECODER | {
    "architectures": ["MistralModel"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    # Published with 4096. A load computes a text longer than the window, which took seconds.
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
MISTRAL_TOKENIZER: Json = {
    "add_bos_token": True,
    "add_eos_token": True,
    "clean_up_tokenization_spaces": False,
    "legacy": True,
    "model_max_length": 1000000000000000019884624838656,
    "sp_model_kwargs": {},
    "spaces_between_special_tokens": False,
    "tokenizer_class": "LlamaTokenizer",
    "use_default_system_prompt": False,
}
GTE_QWEN2_TOKENIZER: Json = QWEN_TOKENIZER | {
    "add_eos_token": True,
    "auto_map": {
        "AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]
    },
    "eos_token": "<|endoftext|>",
    "model_max_length": 32768,
}
GTE_QWEN2: Json = QWEN2 | {
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
    },
    "is_causal": False,
}
E5_PROMPTS = {
    "web_search_query": "Instruct: Given a web search query, retrieve relevant passages that answer the query"
    "\nQuery: ",
    "sts_query": "Instruct: Retrieve semantically similar text.\nQuery: ",
}


def surrounded_ids(folder: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Put <s> before, and </s> behind the tokens of each text; the end is never cut off."""
    return _ids(folder, texts, max_tokens, ("<s>",), "</s>")


def ended_ids(folder: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Put <|endoftext|> behind the tokens of each text; it is never cut off."""
    return _ids(folder, texts, max_tokens, (), "<|endoftext|>")


def surrounded_vectors(folder: Path) -> Sequence[Answer]:
    """Embed each text as the vector of its </s>."""
    return _end_vectors(folder, surrounded_ids)


def ended_vectors(folder: Path) -> Sequence[Answer]:
    """Embed each text as the vector of its <|endoftext|>."""
    return _end_vectors(folder, ended_ids)


def _ids(
    folder: Path, texts: Sequence[str], max_tokens: int, before: tuple[str, ...], end: str
) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, last = [tokenizer.token_to_id(token) for token in before], tokenizer.token_to_id(end)
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[*first, *row[: max_tokens - len(first) - 1], last] for row in rows]


def _end_vectors(folder: Path, token_ids: TokenIds) -> Sequence[Answer]:
    """Embed each text alone, without a prompt and with the first prompts."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    answers = []
    for name in (None, *prompt_names(folder)):
        prompt = config["prompts"][name] if name else ""
        with torch.no_grad():
            ends = [
                model(torch.tensor([row])).last_hidden_state[0, -1]
                for row in token_ids(folder, [prompt + text for text in TEXTS], 4096)
            ]
        vectors = functional.normalize(torch.stack(ends), dim=-1).numpy()
        answers.append(Answer(Embed(tuple(TEXTS), prompt_name=name), vectors.astype(np.float32)))
    return answers


FAMILIES = (
    Family(
        name="e5-mistral",
        checkpoints=("intfloat/e5-mistral-7b-instruct",),
        kind="dense",
        state=Served(),
        network="MistralModel",
        config=MISTRAL,
        vocabulary=LLAMA_2,
        tokenizer_config=MISTRAL_TOKENIZER,
        files=sentence_files("lasttoken", max_seq_length=4096, prompts=E5_PROMPTS),
        reference=surrounded_vectors,
        token_ids=surrounded_ids,
        pooling="last token",
        notes="`add_eos_token` is followed",
    ),
    Family(
        name="sfr-embedding-mistral",
        checkpoints=(
            "Salesforce/SFR-Embedding-Mistral",
            "Salesforce/SFR-Embedding-2_R",
            "Linq-AI-Research/Linq-Embed-Mistral",
        ),
        kind="dense",
        state=Served(),
        network="MistralModel",
        config=MISTRAL,
        vocabulary=LLAMA_2,
        tokenizer_config=MISTRAL_TOKENIZER,
        files=sentence_files("lasttoken", max_seq_length=4096),
        reference=surrounded_vectors,
        token_ids=surrounded_ids,
        pooling="last token",
        notes="`add_eos_token` is followed; queries: `Instruct: …\\nQuery: ` in `prompts`",
    ),
    Family(
        name="gte-qwen2",
        checkpoints=("Alibaba-NLP/gte-Qwen2-1.5B-instruct", "Alibaba-NLP/gte-Qwen2-7B-instruct"),
        kind="dense",
        state=Served(),
        network="Qwen2Model",
        config=GTE_QWEN2,
        vocabulary=QWEN,
        tokenizer_config=GTE_QWEN2_TOKENIZER,
        files=sentence_files("lasttoken", max_seq_length=8192, prompts={"query": E5_PROMPTS["sts_query"]}),
        reference=ended_vectors,
        token_ids=ended_ids,
        pooling="last token",
        notes="an end token behind each text, as its own tokenizer code does",
    ),
)
