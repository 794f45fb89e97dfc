"""Tiny randomly initialised checkpoints of many architectures, written as their libraries write them.

Weights have a large standard deviation: with the usual 0.02 a layer hardly changes its input, and a
comparison would prove nothing.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import AutoModel, AutoModelForSequenceClassification, PretrainedConfig

SMALL = {
    "vocab_size": 30522,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DECODER = SMALL | {"num_key_value_heads": 2, "bos_token_id": 101, "eos_token_id": 102}
# Alternating layers, and a window shorter than most texts.
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# Ids in BERT's vocabulary: special tokens, characters and frequent words; and parts of one character.
FREQUENT_WORDS, CHARACTERS = range(8000), range(29612, 30522)

# name → (config, True if it is computed without padding).
ENCODERS: dict[str, tuple[Callable[[], PretrainedConfig], bool]] = {
    "bert": (lambda: transformers.BertConfig(**SMALL), True),
    "albert": (lambda: transformers.AlbertConfig(**SMALL | {"embedding_size": 16}), True),
    "roberta": (lambda: transformers.RobertaConfig(**SMALL | {"type_vocab_size": 1}), True),
    "xlm-roberta": (
        lambda: transformers.XLMRobertaConfig(**SMALL | {"type_vocab_size": 1, "pad_token_id": 1}),
        True,
    ),
    "mpnet": (lambda: transformers.MPNetConfig(**SMALL), False),
    "deberta": (
        lambda: transformers.DebertaV2Config(
            **SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
        ),
        False,
    ),
    "distilbert": (
        lambda: transformers.DistilBertConfig(
            vocab_size=30522, dim=32, n_layers=3, n_heads=4, hidden_dim=48, initializer_range=0.3
        ),
        True,
    ),
    "electra": (lambda: transformers.ElectraConfig(**SMALL | {"embedding_size": 16}), True),
    "modernbert": (
        lambda: transformers.ModernBertConfig(
            **SMALL | {"global_attn_every_n_layers": 2, "local_attention": 8, "initializer_range": 0.3}
        ),
        True,
    ),
    "nomic": (lambda: transformers.NomicBertConfig(**SMALL), True),
    "gte": (lambda: transformers.GteConfig(**SMALL), True),
    "eurobert": (lambda: transformers.EuroBertConfig(**DECODER), True),
}
DECODERS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: transformers.Qwen2Config(**DECODER),
    "qwen2-both-ways": lambda: transformers.Qwen2Config(**DECODER, is_causal=False),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=6),
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "gemma3": lambda: transformers.Gemma3TextConfig(**DECODER | WINDOWS, head_dim=8),
    "gemma3-both-ways": lambda: transformers.Gemma3TextConfig(
        **DECODER | WINDOWS, head_dim=8, use_bidirectional_attention=True
    ),
}


def make_encoder(config: PretrainedConfig, tokenizer: Path, folder: Path) -> Path:
    """Write a plain transformers checkpoint with the tokenizer of another checkpoint."""
    torch.manual_seed(0)
    AutoModel.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    return _with_tokenizer(tokenizer, folder)


def make_classifier(config: PretrainedConfig, tokenizer: Path, folder: Path, labels: int = 1) -> Path:
    """Write a sequence classifier."""
    torch.manual_seed(0)
    config.num_labels = labels
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.eval().save_pretrained(folder)
    return _with_tokenizer(tokenizer, folder)


def make_language_model(config: PretrainedConfig, tokenizer: Path, folder: Path, end: object) -> Path:
    """Write a language model, masked or causal. end: its AutoModelFor… class of transformers."""
    torch.manual_seed(0)
    end.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    return _with_tokenizer(tokenizer, folder)


def make_sentence_model(
    encoder: Path,
    folder: Path,
    pooling: str,
    after: Sequence[torch.nn.Module] = (),
    prompts: dict[str, str] | None = None,
) -> SentenceTransformer:
    """Write a sentence-transformers checkpoint around an encoder; return its model as the reference."""
    transformer = modules.Transformer(str(encoder), max_seq_length=64)
    pool = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)
    model = SentenceTransformer(modules=[transformer, pool, *after], device="cpu", prompts=prompts)
    model.save(str(folder), create_model_card=False)
    return model


def make_m3(minilm: Path, folder: Path) -> tuple[Path, SentenceTransformer]:
    """Write a checkpoint as BGE-M3's, with three outputs; return it, and its dense model as the reference."""
    encoder = make_encoder(ENCODERS["xlm-roberta"][0](), minilm, folder / "network")
    reference = make_sentence_model(encoder, folder / "m3", "cls", [modules.Normalize()])
    torch.manual_seed(3)
    linear = torch.nn.Linear
    for name, layer in (("sparse_linear.pt", linear(32, 1)), ("colbert_linear.pt", linear(32, 32))):
        torch.save(layer.state_dict(), folder / "m3" / name)
    return folder / "m3", reference


def _with_tokenizer(source: Path, folder: Path) -> Path:
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder / name)
    (folder / "tokenizer.json").write_text(_without_rare_words(source / "tokenizer.json"), encoding="utf-8")
    return folder


@cache
def _without_rare_words(tokenizer: Path) -> str:
    """Return a tokenizer without rare words, whose ids stay: all words take most of the time of a load."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"].items()
    content["model"]["vocab"] = {
        token: number for token, number in vocabulary if number in FREQUENT_WORDS or number in CHARACTERS
    }
    return json.dumps(content)


def with_activation(checkpoint: Path, folder: Path, activation: str) -> Path:
    """Return a folder with the files of a checkpoint, and another `hidden_act` in its config."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": activation}), encoding="utf-8")
    return folder
