"""Reader of settings for late interaction (ColBERT): markers, lengths and query expansion.

Three libraries write them in three layouts. Pure. Sources: sentence-transformers 6.2,
`MultiVectorEncoder` and `Transformer`; PyLate 1.3, `ColBERT`; ColBERT 0.2, `artifact.metadata`. The tokens of
tokenizer classes are those of transformers 5.23.
"""

import string
from typing import Any

import msgspec

from backends.recipe.files import CheckpointFiles, Json
from backends.recipe.modules import is_scaled
from backends.recipe.recipe import LateInteraction, QueryExpansion

# Length to which the original and PyLate expand queries when their files do not state one.
QUERY_TOKENS = 32
# Keys that only PyLate writes.
PYLATE_KEYS = (
    "query_prefix",
    "document_prefix",
    "query_length",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)
ROLES = ("query", "document")
# Mask tokens of the classes that have one unless a file names another.
MASK_TOKENS = ("[MASK]", "<mask>")
# End tokens of the classes without a mask token, and of those whose files say nothing else.
END_TOKENS = {
    "CodeLlamaTokenizer": "</s>",
    "GPT2Tokenizer": "<|endoftext|>",
    "GPTNeoXTokenizer": "<|endoftext|>",
    "LlamaTokenizer": "</s>",
    "PreTrainedTokenizer": "",
    "Qwen2Tokenizer": "<|endoftext|>",
    "T5Tokenizer": "</s>",
    "TokenizersBackend": "",
}


def read_late_interaction(files: CheckpointFiles) -> LateInteraction:
    """Read the settings from a checkpoint's files, in any of the three layouts."""
    found = _read_layout(files)
    expansion = found.expansion
    if expansion is None or expansion.tokens:
        return found
    return msgspec.structs.replace(found, expansion=_with_filler(expansion, files))


def _with_filler(expansion: QueryExpansion, files: CheckpointFiles) -> QueryExpansion:
    """Return the expansion with its filler: the mask token, or the end token of a tokenizer without one."""
    stated = {**files.read_json("special_tokens_map.json"), **files.tokenizer_config}
    mask, end = (_text_of(stated.get(name)) for name in ("mask_token", "eos_token"))
    name = str(stated.get("tokenizer_class") or "").removesuffix("Fast")
    if mask is None and "mask_token" not in stated and name not in END_TOKENS:
        # The class has a mask token of its own, or the files name no class.
        others = (end,) if end else ()
        return msgspec.structs.replace(expansion, tokens=(*MASK_TOKENS, *others), is_stated=False)
    token = mask or end or END_TOKENS.get(name)
    return msgspec.structs.replace(expansion, tokens=(token,) if token else ())


def _text_of(token: Any) -> str | None:
    """Return the text of a token, which a file writes as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_layout(files: CheckpointFiles) -> LateInteraction:
    if "HF_ColBERT" in (files.config.get("architectures") or []):
        return _read_original(files.read_json("artifact.metadata"))
    config = files.sentence_config
    if config.get("model_type") == "ColBERT":
        return _read_pylate(config)
    scaled = is_scaled(files)
    if any(key in config for key in PYLATE_KEYS):
        return msgspec.structs.replace(_read_pylate(config), scaled=scaled)
    return msgspec.structs.replace(_read_native(files), scaled=scaled)


def _read_native(files: CheckpointFiles) -> LateInteraction:
    network, mask = files.transformer_config, files.module_config("MultiVectorMask")
    expansion = network.get("query_expansion")
    prompts = files.sentence_config.get("prompts", {})
    return LateInteraction(
        network.get("query_length"),
        network.get("document_length"),
        None if expansion is None else _native_expansion(expansion),
        _without_none({role: prompts.get(role) for role in ROLES}),
        skipped=tuple(mask.get("skiplist_words") or ()),
    )


def _native_expansion(expansion: Json) -> QueryExpansion:
    return QueryExpansion(
        int(expansion["length"]),
        cuts=expansion.get("strategy") != "min",
        attended=bool(expansion.get("attend", False)),
        tokens=(expansion["token"],) if expansion.get("token") else (),
    )


def _read_pylate(config: Json) -> LateInteraction:
    prompts = {
        role: _prefixed(config.get(f"{role}_prefix"), config.get("prompts", {}).get(role)) for role in ROLES
    }
    length = config.get("query_length")
    expands = config.get("do_query_expansion", True)
    skipped = config.get("skiplist_words")
    attended = bool(config.get("attend_to_expansion_tokens", False))
    return LateInteraction(
        None if expands else length,
        config.get("document_length"),
        QueryExpansion(length or QUERY_TOKENS, attended=attended) if expands else None,
        prompts=_without_none(prompts),
        markers=_markers(config.get("query_prefix"), config.get("document_prefix")),
        skipped=tuple(string.punctuation if skipped is None else skipped),
    )


def _read_original(metadata: Json) -> LateInteraction:
    query = metadata.get("query_token_id") or "[unused0]"
    document = metadata.get("doc_token_id") or "[unused1]"
    attended = bool(metadata.get("attend_to_mask_tokens", False))
    return LateInteraction(
        None,
        metadata.get("doc_maxlen"),
        QueryExpansion(metadata.get("query_maxlen") or QUERY_TOKENS, attended=attended),
        {"query": f"{query} ", "document": f"{document} "},
        (query, document),
        tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
    )


def _prefixed(prefix: str | None, prompt: str | None) -> str:
    """Return PyLate's marker followed by its prompt, which may begin with the same marker."""
    return (prefix or "") + (prompt or "").removeprefix(prefix or "")


def _markers(*prefixes: str | None) -> tuple[str, ...]:
    return tuple(prefix for prefix in prefixes if prefix and prefix.strip())


def _without_none(prompts: dict[str, Any]) -> dict[str, str]:
    return {role: text for role, text in prompts.items() if text is not None}
