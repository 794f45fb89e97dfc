"""Reader of the rules for a tokenizer in the small files next to tokenizer.json.

Pure: knows neither the tokenizers package nor torch.
Sources: the tokenizer classes of transformers 4.57, with which published checkpoints were made. They applied
these keys of tokenizer_config.json to the tokenizer of tokenizer.json; transformers 5 drops `add_bos_token`
and `add_eos_token`. The code of gte-Qwen2's tokenizer as text-embeddings-inference 1.9 and vLLM replace it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from backends.contract import TokenizerSettings
from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer_rules import (
    ENDS,
    AddedWord,
    EndKey,
    EndRule,
    Json,
    LetterRules,
    Origin,
    TokenizerFiles,
    TokenizerRules,
)

# Classes that rebuilt the tokens around a text from the two keys, with the defaults of their tokens.
LLAMA_ENDS = ("<s>", "</s>")
GEMMA_ENDS = ("<bos>", "<eos>")
COHERE_ENDS = ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
NEOX_ENDS = ("<|endoftext|>", "<|endoftext|>")
REBUILDING_CLASSES = {
    "LlamaTokenizer": LLAMA_ENDS,
    "CodeLlamaTokenizer": LLAMA_ENDS,
    "GemmaTokenizer": GEMMA_ENDS,
    "CohereTokenizer": COHERE_ENDS,
    "GPTNeoXTokenizer": NEOX_ENDS,
}
# Classes that took case, accents and Chinese characters from tokenizer_config.json, defaults included.
WORDPIECE_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Bert",
        "ConvBert",
        "DistilBert",
        "Electra",
        "Funnel",
        "LayoutLM",
        "Lxmert",
        "MPNet",
        "MobileBert",
        "Realm",
        "RetriBert",
        "Splinter",
        "SqueezeBert",
    )
)
# Classes that took `add_prefix_space` from tokenizer_config.json, false by default.
PREFIX_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in ("Bart", "Blenderbot", "Deberta", "GPT2", "LED", "Longformer", "Mvp", "Roberta")
)
# Code of gte-Qwen2's and stella_en_1.5B's tokenizer, which puts an end token behind each text.
QWEN_CODE = ("tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast")
QWEN_END = "<|endoftext|>"
SIGLIP_CLASS, SIGLIP2_CLASS = "SiglipTokenizer", "Siglip2Tokenizer"
# Types whose texts were lowered in training; their checkpoints name the class of another tokenizer.
LOWERED_TYPES = frozenset({"siglip2"})
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def rules_of(files: TokenizerFiles, settings: TokenizerSettings) -> TokenizerRules:
    """Return the changes that files and settings require of a tokenizer. Raises: ModelUnavailable."""
    name, code = files.class_name, _code(files.config)
    return TokenizerRules(
        bos=_end_rule(files, "add_bos_token", settings),
        eos=_end_rule(files, "add_eos_token", settings),
        letters=_letters(files) if name in WORDPIECE_CLASSES else None,
        prefix_space=_prefix_space(files),
        added=tuple(_added_words(files)),
        vocabulary_size=files.model.get("vocab_size"),
        code=code[-1] if code else None,
        lower_case=bool(files.network.get("do_lower_case")) or _lowers_letters(files),
        without_punctuation=name == SIGLIP_CLASS,
        splits_special=bool(files.config.get("split_special_tokens")),
        truncation_side=_truncation_side(files),
    )


def _lowers_letters(files: TokenizerFiles) -> bool:
    """Return True for the classes whose code lowers letters, whatever tokenizer.json says."""
    if files.class_name == SIGLIP_CLASS:
        return bool(files.config.get("do_lower_case", True))
    return files.class_name == SIGLIP2_CLASS or files.model.get("model_type") in LOWERED_TYPES


def _end_rule(files: TokenizerFiles, key: EndKey, settings: TokenizerSettings) -> EndRule | None:
    """Return the rule for one side of a text; a setting takes precedence over the files."""
    side, stated, configured = ENDS.index(key), files.config.get(key), getattr(settings, key)
    origin: Origin
    add: bool | None
    if key == "add_eos_token" and set(_code(files.config)) & set(QWEN_CODE):
        origin, default, add = "code", QWEN_END, stated is None or bool(stated)
    elif files.class_name in REBUILDING_CLASSES:
        origin, default, add = "config", REBUILDING_CLASSES[files.class_name][side], stated
    else:
        origin, default, add = "settings", "", None
    token = files.token(key.removeprefix("add_"), default) or None
    if configured is not None:
        return EndRule(key, token, configured, "settings")
    return None if add is None else EndRule(key, token, add, origin)


def _code(config: Json) -> tuple[str, ...]:
    """Return the classes of a tokenizer's own code, without their repository."""
    mapped = config.get("auto_map") or {}
    classes = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    listed = [classes] if isinstance(classes, str) else classes or []
    return tuple(str(name).rsplit("--", 1)[-1] for name in listed if name)


def _truncation_side(files: TokenizerFiles) -> Literal["left", "right"] | None:
    stated: Literal["left", "right"] | None = files.config.get("truncation_side")
    if stated in {None, "left", "right"}:
        return stated
    raise ModelUnavailable(f"`truncation_side` is {stated!r} in tokenizer_config.json; it is left or right")


def _letters(files: TokenizerFiles) -> LetterRules:
    config = files.config
    return LetterRules(
        bool(config.get("do_lower_case", True)),
        config.get("strip_accents"),
        bool(config.get("tokenize_chinese_chars", True)),
    )


def _prefix_space(files: TokenizerFiles) -> bool | None:
    stated = files.config.get("add_prefix_space")
    if files.class_name in PREFIX_CLASSES:
        return bool(stated)
    # Llama's class converted the tokenizer from scratch where the key was stated.
    return False if files.class_name == "LlamaTokenizer" and stated is False else None


def _added_words(files: TokenizerFiles) -> Iterator[AddedWord]:
    """Yield the words that only the small files list; ids are unique."""
    special = {word.content for word in _named_words(files)}
    for id_, word in files.config.get("added_tokens_decoder", {}).items():
        yield _word(word, int(id_))
    for content, id_ in files.added.items():
        is_special = content in special
        yield AddedWord(content, int(id_), normalized=not is_special, special=is_special)
    yield from _named_words(files)


def _named_words(files: TokenizerFiles) -> Iterator[AddedWord]:
    named = files.named
    extra = named.get("additional_special_tokens") or named.get("extra_special_tokens") or ()
    values: Iterable[Any] = extra.values() if isinstance(extra, dict) else extra
    for value in (*(named.get(name) for name in SPECIAL_NAMES), *values):
        if isinstance(value, dict):
            yield msgspec.structs.replace(_word(value, None), special=True)
        elif value:
            yield AddedWord(str(value), normalized=False, special=True)


def _word(word: Json, id_: int | None) -> AddedWord:
    flags = {name: bool(word[name]) for name in AddedWord.__struct_fields__[2:] if name in word}
    return AddedWord(str(word["content"]), id_, **flags)
