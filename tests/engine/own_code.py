"""Checkpoints whose networks are small classes of their own, named by `auto_map`.

The network is a bag of words with a mixing layer: enough to differ from every class of transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.checkpoints import TOKENIZER_FILES

WIDTH, WORDS = 16, 30522
MODULE = "own_modeling"

CONFIGURATION = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=30522, hidden_size=16, pad_token_id=0, **kwargs):
        super().__init__(pad_token_id=pad_token_id, **kwargs)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
"""
MODELING = """
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from .own_configuration import OwnConfig


class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "own"

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask):
        words = self.words(input_ids)
        mask = attention_mask.unsqueeze(-1).to(words.dtype)
        context = (words * mask).sum(1, keepdim=True) / MASKED_COUNT
        hidden = torch.tanh(self.mix(words + context))
        return RETURNED
"""
COUNTS = {"mask": "mask.sum(1, keepdim=True)", "length": "input_ids.shape[1]"}
# Outputs of a forward pass, and the names of other things that published code returns.
RETURNS = {
    "output": "BaseModelOutput(last_hidden_state=hidden)",
    "tuple": "(hidden, None)",
    "dict": "{'last_hidden_state': hidden}",
    "sentence": "{'sentence_embeddings': hidden.mean(1)}",
    "pooled": "(hidden.mean(1),)",
    "logits": "SequenceClassifierOutput(logits=hidden.mul(mask).sum(1)[:, :1])",
    "failure": "1 / 0",
}
OWN_AUTO_MAP = {"AutoConfig": "own_configuration.OwnConfig", "AutoModel": f"{MODULE}.OwnModel"}


def code_files(returned: str = "output", count: str = "mask") -> dict[str, str]:
    """Return the code by file name. count: what the sum of words is divided by."""
    modeling = MODELING.replace("RETURNED", RETURNS[returned]).replace("MASKED_COUNT", COUNTS[count])
    return {f"{MODULE}.py": modeling, "own_configuration.py": CONFIGURATION}


def make_own_model(
    folder: Path,
    tokenizer: Path,
    auto_map: Mapping[str, str] = OWN_AUTO_MAP,
    code: Mapping[str, str] | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint with code in its folder, and return its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights = {
        "words.weight": torch.randn(WORDS, WIDTH),
        "mix.weight": torch.randn(WIDTH, WIDTH),
        "mix.bias": torch.randn(WIDTH),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": dict(auto_map),
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "max_position_embeddings": 64,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(written))
    for name, text in (code_files() if code is None else code).items():
        (folder / name).write_text(text)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return weights


def token_vectors(weights: Mapping[str, Tensor], ids: list[int]) -> Tensor:
    """Compute the network's output (tokens, dim) for one text by hand."""
    words = weights["words.weight"][ids]
    mixed: Tensor = torch.tanh((words + words.mean(0)) @ weights["mix.weight"].T + weights["mix.bias"])
    return mixed
