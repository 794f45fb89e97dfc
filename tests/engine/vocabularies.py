"""Small tokenizers of language models with the rules of the published ones, trained on a few texts.

Each is written as its library writes it: tokenizer.json with normalizer, splitter and post-processor, and
tokenizer_config.json.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# Of Qwen2's and Llama 3's tokenizer.json.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
LLAMA_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>")
# Each answer becomes one token, and so does a question mark with its line break.
ANSWERS = "yes no Yes No 1 0 what?\nwhy?\n" * 60


def write_qwen(folder: Path, texts: Iterable[str]) -> int:
    """Write a byte-level tokenizer as Qwen2, Qwen3 and their rerankers have it; return its size."""
    tokenizer = _byte_level(texts, QWEN_SPECIALS)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "chat_template": "{% for message in messages %}<|im_start|>{{ message.role }}\n{% endfor %}",
    }
    return _write(tokenizer, config, folder)


def write_llama3(folder: Path, texts: Iterable[str]) -> int:
    """Write a byte-level tokenizer that puts a token before each text, as Llama 3 has it; return its size."""
    tokenizer = _byte_level(texts, LLAMA_SPECIALS)
    bos = ("<|begin_of_text|>", 0)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]} $B:1", special_tokens=[bos]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos[0],
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|end_of_text|>",
    }
    return _write(tokenizer, config, folder)


def write_gemma(folder: Path, texts: Iterable[str]) -> int:
    """Write a tokenizer with spaces as a letter and a token before each text, as Gemma has it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(tokenizer, [word for text in texts for word in text.split()], (*GEMMA_SPECIALS, *bytes_))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B:1", special_tokens=[("<bos>", 2)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    return _write(tokenizer, config, folder)


def _byte_level(texts: Iterable[str], specials: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, texts, specials)
    return tokenizer


def _train(tokenizer: Tokenizer, texts: Iterable[str], specials: tuple[str, ...]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *ANSWERS.split(" "), ANSWERS], trainer)


def _write(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"clean_up_tokenization_spaces": False, "model_max_length": 1000, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    size: int = tokenizer.get_vocab_size()
    return size
