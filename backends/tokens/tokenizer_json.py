"""A tokenizer.json that tokenizes as the rest of the checkpoint's files say: edited, or made of older files.

Pure: bytes and rules in, bytes and notes out. The vocabulary stays undecoded where no rule needs it. Sources:
BertTokenizer and CLIPTokenizer of transformers, whose parts and defaults this follows.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer_config import EndRule, TokenizerFiles, TokenizerRules

Json = dict[str, Any]

# Post-processors that put tokens around a text, in place of a template.
FIXED_ENDS = ("BertProcessing", "RobertaProcessing")
# Source: `canonicalize_text` of SigLIP's tokenizer, from big_vision.
PUNCTUATION_STEPS: list[Json] = [
    {"type": "Replace", "pattern": {"Regex": r"[!-/:-@\[-`{-~]"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Strip", "strip_left": True, "strip_right": True},
]
SIDES = {"add_bos_token": "begin with", "add_eos_token": "end in"}


class EditedTokenizer(NamedTuple):
    """Content of a tokenizer.json.

    notes: for the operator, on what was guessed or changed. added: ids that added words have to get.
    """

    content: bytes
    notes: tuple[str, ...]
    added: dict[str, int]


class Ends(NamedTuple):
    """Tokens before and after a text."""

    leading: tuple[str, ...] = ()
    trailing: tuple[str, ...] = ()


class _Model(msgspec.Struct):
    """Vocabulary in a tokenizer.json: ids by token, or tokens and their scores in the order of their ids."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}

    def ids(self) -> dict[str, int]:
        if isinstance(self.vocab, dict):
            return self.vocab
        return {token: id_ for id_, (token, _) in enumerate(self.vocab)}


class _Document:
    """Parts of a tokenizer.json, decoded when they are needed. Raises: ModelUnavailable."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        self._vocabulary: dict[str, int] | None = None
        self._added_ids: dict[str, int] | None = None
        self.is_changed = False

    def part(self, name: str) -> Any:
        return msgspec.json.decode(self._parts[name]) if name in self._parts else None

    def replace(self, name: str, value: Any) -> None:
        if value != self.part(name):
            self._parts[name] = msgspec.Raw(msgspec.json.encode(value))
            self._added_ids = None
            self.is_changed = True

    def added_ids(self) -> dict[str, int]:
        if self._added_ids is None:
            self._added_ids = {word["content"]: word["id"] for word in self.part("added_tokens") or ()}
        return self._added_ids

    def id_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or of an added one."""
        added = self.added_ids()
        if token in added:
            return added[token]
        if self._vocabulary is None:
            self._vocabulary = msgspec.json.decode(self._parts["model"], type=_Model).ids()
        return self._vocabulary.get(token)

    def encode(self) -> bytes:
        return msgspec.json.encode(self._parts) if self.is_changed else self.content


def apply_rules(content: bytes, rules: TokenizerRules) -> EditedTokenizer:
    """Return a tokenizer.json that follows the rules.

    Raises: ModelUnavailable, if it is not a tokenizer.json, or if a rule does not fit it.
    """
    try:
        document = _Document(content)
        before = document.added_ids()
        notes = [*_add_words(document, rules), *_set_ends(document, rules)]
        _set_letters(document, rules)
        _set_prefix_space(document, rules)
        _set_lower_case(document, rules)
        added = {word: id_ for word, id_ in document.added_ids().items() if word not in before}
        return EditedTokenizer(document.encode(), tuple(notes), added)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"tokenizer.json is not a tokenizer's: {error}") from error


def _add_words(document: _Document, rules: TokenizerRules) -> Iterable[str]:
    """Add the words that are missing, and correct flags that the small files state otherwise."""
    listed = {word["content"]: word for word in document.part("added_tokens") or ()}
    changed = dict(listed)
    for word in rules.added:
        if word.content in changed and word.id is None:
            continue
        known = document.id_of(word.content)
        id_ = word.id if known is None else known
        if word.id not in (None, id_):
            yield f"tokenizer.json gives {word.content} the id {id_}, and tokenizer_config.json {word.id}"
        elif id_ is not None and rules.vocabulary_size is not None and id_ >= rules.vocabulary_size:
            yield f"the token {word.content} is not used: the network has no vector for its id {id_}"
        elif id_ is not None:
            changed[word.content] = msgspec.to_builtins(word) | {"id": id_}
    if changed != listed:
        document.replace("added_tokens", sorted(changed.values(), key=lambda word: word["id"]))


def _set_letters(document: _Document, rules: TokenizerRules) -> None:
    normalizer = document.part("normalizer")
    if rules.letters is None or not normalizer or normalizer["type"] != "BertNormalizer":
        return
    document.replace("normalizer", normalizer | msgspec.structs.asdict(rules.letters))


def _set_lower_case(document: _Document, rules: TokenizerRules) -> None:
    """Lower all letters before any other step; special tokens are found earlier, and stay."""
    first: list[Json] = [{"type": "Lowercase"}] if rules.lower_case else []
    if rules.without_punctuation:
        first += PUNCTUATION_STEPS
    normalizer = document.part("normalizer")
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    if first:
        changed = [*first, *(step for step in steps if step)]
        document.replace("normalizer", {"type": "Sequence", "normalizers": changed})


def _set_prefix_space(document: _Document, rules: TokenizerRules) -> None:
    if rules.prefix_space is None:
        return
    splitter, normalizer = document.part("pre_tokenizer") or {}, document.part("normalizer") or {}
    if "add_prefix_space" in splitter:
        document.replace("pre_tokenizer", splitter | {"add_prefix_space": rules.prefix_space})
    if not rules.prefix_space and "prepend_scheme" in splitter:
        document.replace("pre_tokenizer", splitter | {"prepend_scheme": "never"})
    if not rules.prefix_space and normalizer.get("type") == "Sequence":
        parts = [part for part in normalizer["normalizers"] if part["type"] != "Prepend"]
        document.replace("normalizer", normalizer | {"normalizers": parts})


def _set_ends(document: _Document, rules: TokenizerRules) -> Iterable[str]:
    """Put the tokens around a text that the rules ask for; yield a note per change."""
    processor = document.part("post_processor")
    ends = _ends_of(processor)
    wanted = Ends(_wanted(ends.leading, rules.bos), _wanted(ends.trailing, rules.eos))
    if wanted != ends:
        document.replace("post_processor", _with_ends(processor, wanted, document.id_of))
        yield from _change_notes(ends.leading, wanted.leading, rules.bos, rules.code)
        yield from _change_notes(ends.trailing, wanted.trailing, rules.eos, rules.code)
    elif rules.code is not None and (rules.eos is None or rules.eos.origin != "settings"):
        yield f"the tokenizer's own code ({rules.code}) is not run: tokenizer.json is used as it is"


def _change_notes(
    before: tuple[str, ...], after: tuple[str, ...], rule: EndRule | None, code: str | None
) -> Iterable[str]:
    if rule is None or before == after or rule.origin == "settings":
        return
    result = f"texts {SIDES[rule.key]} {' '.join(after) or 'no token of its own'}"
    if rule.origin == "code":
        yield (
            f"guess: {result}, as the tokenizer's own code ({code}) is known to do; it is not run. "
            f"`{rule.key}` of the upstream decides otherwise"
        )
    else:
        asked = f"`{rule.key}: {str(rule.add).lower()}` of tokenizer_config.json asks for it"
        yield f"{result}: {asked}, and tokenizer.json says otherwise"


def _wanted(present: tuple[str, ...], rule: EndRule | None) -> tuple[str, ...]:
    """Return the tokens on one side of a text. Raises: ModelUnavailable, if the rule does not fit."""
    if rule is None or (rule.add and rule.token in present):
        return present
    if rule.add and rule.token is None:
        raise ModelUnavailable(f"{_shown(rule)} needs {_name(rule)} in tokenizer_config.json; it has none")
    if rule.origin == "config":
        return (str(rule.token),) if rule.add else ()
    if rule.token in present:
        return tuple(token for token in present if token != rule.token)
    if present and rule.origin == "code":
        # A guess about code yields to a token that tokenizer.json states.
        return present
    if present and rule.add:
        raise ModelUnavailable(
            f"{_shown(rule)} does not apply: texts {SIDES[rule.key]} {' '.join(present)}, and {_name(rule)} "
            f"of tokenizer_config.json is {rule.token or 'not set'}"
        )
    # Without the token to leave out, nothing is left out: [SEP] is no `eos_token`.
    return (str(rule.token),) if rule.add else present


def _shown(rule: EndRule) -> str:
    return f"`{rule.key}: {str(rule.add).lower()}`"


def _name(rule: EndRule) -> str:
    return f"`{rule.key.removeprefix('add_')}`"


def _processors(processor: Json | None) -> list[Json]:
    if processor is None:
        return []
    return list(processor["processors"]) if processor["type"] == "Sequence" else [processor]


def _ends_of(processor: Json | None) -> Ends:
    """Return the tokens that a post-processor puts around a single text."""
    for part in _processors(processor):
        if part["type"] in FIXED_ENDS:
            return Ends((part["cls"][0],), (part["sep"][0],))
        if part["type"] == "TemplateProcessing":
            return _ends_of_template(part["single"])
    return Ends()


def _ends_of_template(pieces: list[Json]) -> Ends:
    place = next(i for i, piece in enumerate(pieces) if "Sequence" in piece)
    names = [piece["SpecialToken"]["id"] if "SpecialToken" in piece else "" for piece in pieces]
    return Ends(tuple(names[:place]), tuple(names[place + 1 :]))


def _with_ends(processor: Json | None, ends: Ends, id_of: Callable[[str], int | None]) -> Json:
    """Return a post-processor that puts these tokens around a text, and around each text of a pair."""
    single, second = _surrounded("A", 0, ends), _surrounded("B", 1, ends)
    tokens = {token: _template_token(token, id_of(token)) for side in ends for token in side}
    template: Json = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": tokens,
    }
    replaced = (*FIXED_ENDS, "TemplateProcessing")
    rest = [part for part in _processors(processor) if part["type"] not in replaced]
    return {"type": "Sequence", "processors": [*rest, template]} if rest else template


def _surrounded(sequence: str, type_id: int, ends: Ends) -> list[Json]:
    leading, trailing = (
        [{"SpecialToken": {"id": token, "type_id": type_id}} for token in side] for side in ends
    )
    return [*leading, {"Sequence": {"id": sequence, "type_id": type_id}}, *trailing]


def _template_token(token: str, id_: int | None) -> Json:
    if id_ is None:
        raise ModelUnavailable(f"the token {token} of tokenizer_config.json is not in the vocabulary")
    return {"id": token, "ids": [id_], "tokens": [token]}


VOCABULARY_FILE = "vocab.txt"
# Classes whose tokenizer has the parts of BERT's.
BERT_CLASSES = frozenset(
    ("BertTokenizer", "ConvBertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
)
BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def wordpiece_json(vocabulary: bytes, files: TokenizerFiles) -> bytes:
    """Return the tokenizer.json of a checkpoint of BERT's kind that has only a vocab.txt.

    vocabulary: content of that file. Raises: ModelUnavailable, if the tokenizer is of another kind.
    """
    if files.class_name not in BERT_CLASSES or files.config.get("do_basic_tokenize") is False:
        raise ModelUnavailable(f"no readable tokenizer.json, and {VOCABULARY_FILE} is not plainly BERT's")
    # Other characters than a line feed end no line: they can be tokens.
    lines = vocabulary.decode("utf-8", "replace").replace("\r\n", "\n").removesuffix("\n").split("\n")
    return msgspec.json.encode(_document(files, {token: id_ for id_, token in enumerate(lines)}))


def _document(files: TokenizerFiles, vocabulary: dict[str, int]) -> dict[str, Any]:
    tokens = {key: files.token(key, default) or default for key, default in BERT_TOKENS.items()}
    start, end = tokens["cls_token"], tokens["sep_token"]
    missing = [token for token in (start, end, tokens["unk_token"]) if token not in vocabulary]
    if missing:
        raise ModelUnavailable(f"{VOCABULARY_FILE} has no token {', '.join(missing)}")
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = sorted((vocabulary[token], token) for token in set(tokens.values()) if token in vocabulary)
    return {
        "version": "1.0",
        "added_tokens": [{"id": id_, "content": token, **special} for id_, token in added],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(start, 0), _sequence("A", 0), _special(end, 0)],
            "pair": [
                *(_special(start, 0), _sequence("A", 0), _special(end, 0)),
                *(_sequence("B", 1), _special(end, 1)),
            ],
            "special_tokens": {
                token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (start, end)
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens["unk_token"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


CLIP_VOCABULARY, CLIP_MERGES = "vocab.json", "merges.txt"
CLIP_CLASS = "CLIPTokenizer"
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def clip_json(vocabulary: bytes, merges: bytes, files: TokenizerFiles) -> bytes:
    """Return the tokenizer.json of a CLIP that has only a vocabulary and its merges.

    vocabulary, merges: content of those files. Raises: ModelUnavailable, if they are not CLIP's.
    """
    try:
        ids = msgspec.json.decode(vocabulary, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ModelUnavailable(f"{CLIP_VOCABULARY} is not a vocabulary: {error}") from error
    start, end = files.token("bos_token", START) or START, files.token("eos_token", END) or END
    missing = [token for token in (start, end) if token not in ids]
    if missing:
        raise ModelUnavailable(f"{CLIP_VOCABULARY} has no token {', '.join(missing)}")
    lines = merges.decode("utf-8", "replace").split("\n")
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    return msgspec.json.encode(_clip_document(ids, pairs, start, end))


def _clip_document(ids: dict[str, int], pairs: list[list[str]], start: str, end: str) -> dict[str, Any]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    lowered = [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Lowercase"},
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Removed", "invert": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": ids[token], "content": token, **special} for token in (start, end)],
        "normalizer": {"type": "Sequence", "normalizers": lowered},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [end, ids[end]],
            "cls": [start, ids[start]],
            "trim_offsets": False,
            "add_prefix_space": False,
        },
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "unk_token": end,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "vocab": ids,
            "merges": pairs,
        },
    }
