"""Small files of a checkpoint whose tokenizer counts words and two special tokens, as the fakes do."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

MAX_TOKENS = 16


def write_small_files(folder: Path, max_tokens: int = MAX_TOKENS, labels: Sequence[str] = ()) -> Path:
    """Write tokenizer.json and configs; the prompt `query` is one word. labels: those of a classifier."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {str(index): label for index, label in enumerate(labels)}
    configs = {
        "config.json": {"model_type": "bert", "max_position_embeddings": max_tokens, "id2label": names},
        "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "default_prompt_name": None},
    }
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content))
    return folder
