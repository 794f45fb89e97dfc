"""Reader of late-interaction (ColBERT) settings: markers, lengths and query expansion.

Three libraries write them in three layouts. Pure. Sources: sentence-transformers 6.2,
`MultiVectorEncoder` and `Transformer`; PyLate 1.3, `ColBERT`; ColBERT 0.2, `artifact.metadata`.
"""

import string
from typing import Any

from backends.torch.files import CheckpointFiles, Json
from backends.torch.recipe import LateInteraction, QueryExpansion

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


def read_late_interaction(files: CheckpointFiles) -> LateInteraction:
    """Read the settings from a checkpoint's files, in any of the three layouts."""
    if "HF_ColBERT" in (files.config.get("architectures") or []):
        return _read_original(files.read_json("artifact.metadata"))
    config = files.sentence_config
    if config.get("model_type") == "ColBERT" or any(key in config for key in PYLATE_KEYS):
        return _read_pylate(config)
    return _read_native(files)


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
        token=expansion.get("token"),
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
