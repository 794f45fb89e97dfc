"""Tokenization with a checkpoint's own tokenizer; only this module imports the `tokenizers` package.

This module knows nothing of torch: the gateway counts tokens with it, and the engine computes with it.
Rule: every function here is CPU-bound and releases the GIL. Call it outside the event loop, except for a few
words of text.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer

from backends.checkpoints.small_files import processor_arguments, read_json_object, read_network_settings
from backends.checkpoints.static_models import StaticModel, find_static
from backends.contract import ModelInput, Token, TokenizerSettings, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable, input_too_long
from backends.contract.texts import (
    CHARACTERS_PER_TOKEN,
    DETOKENIZE_IDS_MAX,
    TOKEN_ID_LIMIT,
    TOKENIZE_BYTES_MAX,
    clip_text,
)
from backends.tokens.tokenizer_config import (
    TokenizerFiles,
    TokenizerRules,
    TypeIds,
    find_type_ids,
    rules_of,
    written_with,
)
from backends.tokens.tokenizer_json import (
    CLIP_CLASS,
    CLIP_MERGES,
    CLIP_VOCABULARY,
    VOCABULARY_FILE,
    EditedTokenizer,
    apply_rules,
    clip_json,
    wordpiece_json,
)

AS_FILES_SAY = TokenizerSettings()
TOKENIZER_FILE = "tokenizer.json"
SMALL_FILES = (
    "tokenizer_config",
    "special_tokens_map",
    "added_tokens",
    "config",
    "config_sentence_transformers",
)
# Vocabularies that another library reads.
OTHER_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model", "merges.txt")


# Classes that transformers 5 builds without the table of normalized characters in tokenizer.json.
REBUILT_CLASSES = frozenset({"BigBirdTokenizer", "DebertaV2Tokenizer"})
REBUILT_NOTE = (
    "texts are normalized as tokenizer.json says, as in the training of the model; transformers 5 leaves its "
    "table out, and gives texts with full-width letters, ligatures or characters without width other vectors"
)


class TokenSequences(msgspec.Struct, frozen=True):
    """Token ids of each input with special tokens, within the model's maximum length.

    type_ids: distinguish the two texts of a pair. truncated: indices of the inputs that were cut.
    """

    ids: list[list[int]]
    type_ids: list[list[int]]
    truncated: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each input."""
        return [len(ids) for ids in self.ids]


class TokenCount(msgspec.Struct, frozen=True):
    """Total tokens of all inputs as the model reads them, and the indices of the truncated inputs."""

    tokens: int
    truncated: tuple[int, ...]


class AddedIds(NamedTuple):
    """Ids that a tokenizer puts before and after a text."""

    before: list[int]
    after: list[int]


class Vocabulary:
    """Decoder of token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer

    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool, first_index: int = 0
    ) -> list[str]:
        """Return the text of each list of ids. first_index: of the first list, for the message of an error.

        Raises: InvalidWork, if an id is not in this vocabulary.
        """
        lists = [list(sequence) for sequence in ids]
        valid = {id_ for sequence in lists for id_ in sequence if self._contains(id_)}
        for index, sequence in enumerate(lists, first_index):
            invalid = next((id_ for id_ in sequence if id_ not in valid), None)
            if invalid is not None:
                raise InvalidWork(
                    f"input {index} contains {invalid}, which is not the id of a token of this model"
                )
        return self._tokenizer.decode_batch(lists, skip_special_tokens=skip_special_tokens)

    def decode_own(self, ids: Sequence[Sequence[int]], *, first_index: int = 0) -> list[str]:
        """Return the text that the vocabulary's own model reads as each list of ids.

        The special tokens that the tokenizer adds are removed from both ends. Any other stays in the text,
        where the model reads it as itself. Raises: InvalidWork, as `decode`.
        """
        before, after = _added_ids(self._tokenizer)
        contents = [_between(list(sequence), before, after) for sequence in ids]
        return self.decode(contents, skip_special_tokens=False, first_index=first_index)

    def _contains(self, id_: int) -> bool:
        # A vocabulary can have gaps, therefore its size is not enough to validate an id.
        return 0 <= id_ < TOKEN_ID_LIMIT and self._tokenizer.id_to_token(id_) is not None


def _added_ids(tokenizer: Tokenizer) -> AddedIds:
    encoded = tokenizer.encode("a")
    marks = encoded.special_tokens_mask
    first = sum(1 for _ in takewhile(bool, marks))
    last = len(marks) - sum(1 for _ in takewhile(bool, reversed(marks)))
    return AddedIds(encoded.ids[:first], encoded.ids[last:])


def _between(ids: list[int], before: list[int], after: list[int]) -> list[int]:
    start = len(before) if ids[: len(before)] == before else 0
    stop = len(ids) - len(after) if ids[len(ids) - len(after) :] == after else len(ids)
    return ids[start : max(start, stop)]


class Traits(msgspec.Struct, frozen=True):
    """Properties of a tokenizer that its vocabulary does not show.

    notes: for the operator, on guesses and settled conflicts. truncation_side: end of a text that is cut
    where a request names none. type_ids: presence of ids that distinguish the texts of a pair.
    """

    notes: tuple[str, ...] = ()
    truncation_side: Truncate = Truncate.RIGHT
    type_ids: TypeIds = TypeIds()


NO_TRAITS = Traits()


class TextCounter:
    """Counter of tokens, without truncation: one copy of a tokenizer serves every maximum length.

    special_tokens, pair_special_tokens: tokens that are added to a text, and to a pair of texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.special_tokens: int = tokenizer.num_special_tokens_to_add(is_pair=False)
        self.pair_special_tokens: int = tokenizer.num_special_tokens_to_add(is_pair=True)
        self._tokenizer = tokenizer

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text, without special tokens."""
        # The length of an encoding; its ids would be Python objects, made while the GIL is held.
        return list(map(len, self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the token of each id, as the vocabulary spells it; an id beyond it is in brackets."""
        found = self._tokenizer.id_to_token
        return [found(id_) or f"[{id_}]" for id_ in ids]

    def cut(self, texts: Sequence[str], most: int, side: Truncate) -> list[str]:
        """Return each text with its first `most` tokens at most, or its last ones if the left side is cut.

        At least one character stays, even if it has more tokens.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            text if len(encoding) <= most else self._cut(text, encoding.offsets, most, side)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _cut(self, text: str, offsets: list[tuple[int, int]], most: int, side: Truncate) -> str:
        kept = most
        while True:
            start, end = offsets[-kept if side is Truncate.LEFT else kept - 1]
            part = text[start:] if side is Truncate.LEFT else text[:end]
            # Tokens of one character share its place, and a part of a word may have other tokens by itself.
            excess = self.count([part])[0] - most
            if excess <= 0 or kept == 1:
                return part
            kept = max(1, kept - excess)


class TextTokenizer:
    """Tokenizer of one checkpoint with the model's maximum length.

    traits: what the checkpoint's files say of it beyond token ids.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, traits: Traits = NO_TRAITS) -> None:
        # The file contains the padding and truncation of the training; here both are explicit.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.max_tokens = max_tokens
        self.traits = traits
        self._tokenizer = tokenizer
        # A copy takes as long as reading the file: it is made for the first text that is too long.
        self._truncating: dict[Truncate, Tokenizer] = {}

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._tokenizer.get_vocab_size()

    def encode(
        self,
        texts: Sequence[ModelInput],
        truncate: Truncate,
        most: int | None = None,
        *,
        special: bool = True,
    ) -> TokenSequences:
        """Tokenize texts or pairs; truncation shortens the longer text of a pair first.

        most: cut at so many tokens, special ones included, if the model reads more. special: the tokenizer's
        own special tokens are added. Raises: InvalidWork, if truncate is ERROR and an input is longer than
        the model, or `most` leaves no room for a text.
        """
        is_shorter = most is not None and most < self.max_tokens and truncate is not Truncate.ERROR
        return self._encode(list(texts), truncate, most if is_shorter else None, special=special)

    def measure(self, items: Sequence[ModelInput], truncate: Truncate, first_index: int = 0) -> TokenCount:
        """Count tokens after truncation, without their ids. first_index: index of the first input.

        Raises: InvalidWork, as `encode` does.
        """
        clipped = self._clipped(items, truncate, first_index)
        lengths = self._lengths(self._tokenizer.encode_batch_fast(clipped), truncate, first_index)
        truncated = [
            first_index + i
            for i, item in enumerate(items)
            if lengths[i] > self.max_tokens or clipped[i] is not item
        ]
        return TokenCount(sum(min(length, self.max_tokens) for length in lengths), tuple(truncated))

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Decode token ids, as `Vocabulary.decode` does, but no more than a reply may have."""
        if sum(map(len, ids)) > DETOKENIZE_IDS_MAX:
            raise InvalidWork(f"more than {DETOKENIZE_IDS_MAX} ids in a request")
        return Vocabulary(self._tokenizer).decode(ids, skip_special_tokens=skip_special_tokens)

    def explain(
        self, texts: Sequence[str], *, add_special_tokens: bool, pieces: bool = False
    ) -> list[list[Token]]:
        """Return the tokens of each text in the form of TEI's /tokenize, without truncation.

        pieces: with the vocabulary's texts instead of those in the input.

        Raises: InvalidWork, if the texts, with their prompts, are larger than a reply may come from.
        """
        if sum(len(text.encode()) for text in texts) > TOKENIZE_BYTES_MAX:
            raise InvalidWork(f"more than {TOKENIZE_BYTES_MAX} bytes of text, prompts included")
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [
            _tokens_of(text, encoding, pieces=pieces) for text, encoding in zip(texts, encodings, strict=True)
        ]

    def tokens_with_starts(self, text: str) -> list[tuple[int, int]]:
        """Return (id, start in characters) of each token, without special tokens and truncation."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [(id_, start) for id_, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens and truncation."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def prompt_lengths(self, prompts: Sequence[str]) -> list[int]:
        """Return the tokens of each prompt and of all in front of it.

        Raises: InvalidWork, if a prompt leaves no room for a text.
        """
        behind = len(self.added_ids().after)
        clipped = [_clip(prompt, self.max_tokens, Truncate.RIGHT) for prompt in prompts]
        lengths = list(map(len, self._tokenizer.encode_batch_fast(clipped)))
        if max(lengths, default=0) >= self.max_tokens:
            raise InvalidWork(f"the prompt alone fills the {self.max_tokens} tokens of the model")
        return [length - behind for length in lengths]

    def added_ids(self) -> AddedIds:
        """Return the ids that the tokenizer puts around a text."""
        return _added_ids(self._tokenizer)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def token(self, id_: int) -> str | None:
        """Return the token of an id, None if it is not in the vocabulary."""
        return self._tokenizer.id_to_token(id_)

    def tokens_from(self, first: int) -> list[str]:
        """Return the tokens whose ids are not below a number, in the order of their ids."""
        added = max(self._tokenizer.get_added_tokens_decoder(), default=-1) + 1
        tokens = map(self._tokenizer.id_to_token, range(first, max(added, self.vocabulary_size)))
        return [token for token in tokens if token is not None]

    def with_max_tokens(self, max_tokens: int, markers: Sequence[str] = ()) -> "TextTokenizer":
        """Return a copy with this maximum length. markers: tokens of the vocabulary to keep unsplit."""
        tokenizer = _copy(self._tokenizer)
        for marker in markers:
            _register_marker(tokenizer, marker)
        return TextTokenizer(tokenizer, max_tokens, self.traits)

    def _truncating_at(self, side: Truncate) -> Tokenizer:
        """Return the tokenizer that cuts texts. Two threads may each make one, which are equal."""
        found = self._truncating.get(side)
        if found is None:
            found = _copy(self._tokenizer)
            found.enable_truncation(self.max_tokens, strategy="longest_first", direction=side.value)
            self._truncating[side] = found
        return found

    def _encode(
        self, items: Sequence[ModelInput], truncate: Truncate, most: int | None, *, special: bool
    ) -> TokenSequences:
        clipped = self._clipped(items, truncate)
        cut = {i for i, item in enumerate(items) if clipped[i] is not item}
        encodings: list[Encoding] = self._tokenizer.encode_batch_fast(clipped, add_special_tokens=special)
        lengths = self._lengths(encodings, truncate)
        too_long = [i for i, length in enumerate(lengths) if length > (most or self.max_tokens)]
        if too_long:
            long_items = [clipped[i] for i in too_long]
            shorten = partial(_shortened, self._tokenizer, side=truncate, special=special)
            truncated = (
                self._truncating_at(truncate).encode_batch_fast(long_items)
                if most is None and special
                else [shorten(item, most=most or self.max_tokens) for item in long_items]
            )
            for index, encoding in zip(too_long, truncated, strict=True):
                encodings[index] = encoding
        return TokenSequences(
            [encoding.ids for encoding in encodings],
            [
                encoding.type_ids if self.traits.type_ids.given else [0] * len(encoding)
                for encoding in encodings
            ],
            tuple(sorted({*too_long, *cut})),
        )

    def _clipped(
        self, items: Sequence[ModelInput], truncate: Truncate, first_index: int = 0
    ) -> list[ModelInput]:
        if truncate is Truncate.ERROR:
            _refuse_oversized(items, first_index, self.max_tokens)
        return [_clip(item, self.max_tokens, truncate) for item in items]

    def _lengths(self, encodings: Sequence[Encoding], truncate: Truncate, first_index: int = 0) -> list[int]:
        """Return the tokens of each encoding; refuse one that is too long if it must not be cut."""
        # The length of an encoding; its ids would be Python objects, made while the GIL is held.
        lengths = list(map(len, encodings))
        for index, length in enumerate(lengths if truncate is Truncate.ERROR else (), first_index):
            if length > self.max_tokens:
                raise input_too_long(self.max_tokens, f"{length} tokens", index)
        return lengths


def _refuse_oversized(items: Sequence[ModelInput], first_index: int, max_tokens: int) -> None:
    """Refuse inputs that are certainly too long, without tokenizing them."""
    limit = max_tokens * CHARACTERS_PER_TOKEN
    for index, item in enumerate(items, first_index):
        characters = len(item) if isinstance(item, str) else len(item[0]) + len(item[1])
        if characters > limit:
            raise input_too_long(max_tokens, f"{characters} characters", index)


def _shortened(
    tokenizer: Tokenizer, item: ModelInput, *, side: Truncate, most: int, special: bool
) -> Encoding:
    """Return the tokens of a text or pair, with at most so many. Raises: InvalidWork.

    The tokenizer's own truncation is a setting, which would need a copy for each length.
    """
    texts = [item] if isinstance(item, str) else list(item)
    room = most - (tokenizer.num_special_tokens_to_add(is_pair=len(texts) == 2) if special else 0)
    if room < len(texts):
        raise InvalidWork(f"{most} tokens leave no room for a text next to the special tokens")
    parts = tokenizer.encode_batch(texts, add_special_tokens=False)
    for part, kept in zip(parts, _shares([len(part) for part in parts], room), strict=True):
        part.truncate(kept, direction=side.value)
    pair = parts[1] if len(parts) == 2 else None
    return tokenizer.post_process(parts[0], pair, add_special_tokens=special)


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return the tokens to keep of a text, or of each text of a pair, of which the longer is cut first.

    If both have more than a half, both keep one. Source: tokenizers, strategy `longest_first`.
    """
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    half = min(shorter, room // 2)
    kept = [half, room - half]
    return kept if lengths[0] <= lengths[1] else kept[::-1]


def _clip(item: ModelInput, max_tokens: int, truncate: Truncate) -> ModelInput:
    """Cut the text beyond a maximum length; return the same object if nothing is cut."""
    if isinstance(item, str):
        return clip_text(item, max_tokens, truncate)
    clipped = (clip_text(item[0], max_tokens, truncate), clip_text(item[1], max_tokens, truncate))
    return item if clipped == item else clipped


class FileKey(NamedTuple):
    """A file as it was read, and the rules applied to it. max_tokens: 0 for a counter."""

    path: str
    changed_ns: int
    size: int
    rules: TokenizerRules
    max_tokens: int


class TokenizerFile(NamedTuple):
    """File with a checkpoint's vocabulary, the small files next to it, and the rules for it."""

    path: Path
    files: TokenizerFiles
    rules: TokenizerRules

    def key(self, max_tokens: int) -> FileKey:
        """Return the identity of the file's present content and rules. Raises: ModelUnavailable."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise ModelUnavailable(f"no readable {self.path.name} in {self.path.parent}") from error
        return FileKey(str(self.path), status.st_mtime_ns, status.st_size, self.rules, max_tokens)

    def read(self) -> EditedTokenizer:
        """Return the content of a tokenizer.json that follows the rules. Raises: ModelUnavailable."""
        try:
            return apply_rules(self._content(), self.rules)
        except OSError as error:
            raise ModelUnavailable(f"no readable {self.path.name} in {self.path.parent}") from error
        except ModelUnavailable as error:
            raise ModelUnavailable(f"{self.path.parent}: {error.message}") from error

    def _content(self) -> bytes:
        """Return the tokenizer.json, made of a vocabulary if there is none."""
        content = self.path.read_bytes()
        if self.path.name == VOCABULARY_FILE:
            return wordpiece_json(content, self.files)
        if self.path.name == CLIP_VOCABULARY:
            return clip_json(content, (self.path.parent / CLIP_MERGES).read_bytes(), self.files)
        return content


# Tokenizers in use. Each takes several MB that the allocator hardly gives back, at every reload.
_opened: WeakValueDictionary[FileKey, "TextTokenizer | TextCounter"] = WeakValueDictionary()
# The last ones stay open: a reload closes the old upstream before the new one counts its first text.
RECENT_MAX = 4
_recent: "deque[TextTokenizer | TextCounter]" = deque(maxlen=RECENT_MAX)
_opening = Lock()


def open_tokenizer(
    checkpoint: Path, max_tokens: int, settings: TokenizerSettings = AS_FILES_SAY
) -> TextTokenizer:
    """Read a checkpoint's tokenizer, or return the tokenizer of the same files that is in use.

    Raises: ModelUnavailable.
    """
    file = find_tokenizer(checkpoint, settings)
    shared = _share(file.key(max_tokens), lambda: _open_text_tokenizer(file, max_tokens))
    assert isinstance(shared, TextTokenizer)
    return shared


def open_counter(checkpoint: Path, settings: TokenizerSettings = AS_FILES_SAY) -> TextCounter:
    """Read a checkpoint's tokenizer for counting only.

    Raises: ModelUnavailable.
    """
    file = find_tokenizer(checkpoint, settings)
    shared = _share(file.key(0), lambda: TextCounter(_read(file, file.read())))
    assert isinstance(shared, TextCounter)
    return shared


def open_vocabulary(checkpoint: Path, settings: TokenizerSettings = AS_FILES_SAY) -> Vocabulary:
    """Read a checkpoint's tokenizer for decoding only.

    Raises: ModelUnavailable.
    """
    file = find_tokenizer(checkpoint, settings)
    return Vocabulary(_read(file, file.read()))


def _open_text_tokenizer(file: TokenizerFile, max_tokens: int) -> TextTokenizer:
    edited = file.read()
    tokenizer = _read(file, edited)
    # transformers takes the side of the file's own truncation where tokenizer_config.json states none.
    stated = (tokenizer.truncation or {}).get("direction", "right")
    side = Truncate(file.rules.truncation_side or stated)
    notes = edited.notes
    if side is Truncate.LEFT:
        notes += ("inputs that are too long lose their start, as the tokenizer's `truncation_side` says",)
    if file.files.class_name in REBUILT_CLASSES and "Precompiled" in str(tokenizer.normalizer):
        notes += (REBUILT_NOTE,)
    return TextTokenizer(tokenizer, max_tokens, Traits(notes, side, file.rules.type_ids))


def _share(
    key: FileKey, create: "Callable[[], TextTokenizer | TextCounter]"
) -> "TextTokenizer | TextCounter":
    # Held while a file is read, so that callers that need the same one at once read it once.
    with _opening:
        shared = _opened.get(key)
        if shared is None:
            shared = _opened[key] = create()
        if shared not in _recent:
            _recent.append(shared)
    return shared


def find_tokenizer(checkpoint: Path, settings: TokenizerSettings) -> TokenizerFile:
    """Return the file with a checkpoint's vocabulary. Raises: ModelUnavailable, with the remedy."""
    static = find_static(checkpoint)
    if static is not None:
        return _tokenizer_of(static, settings)
    for name in (TOKENIZER_FILE, VOCABULARY_FILE):
        if (checkpoint / name).is_file():
            files = _read_small_files(checkpoint)
            rules = msgspec.structs.replace(rules_of(files, settings), type_ids=find_type_ids(files))
            return TokenizerFile(checkpoint / name, files, rules)
    if (checkpoint / CLIP_VOCABULARY).is_file() and (checkpoint / CLIP_MERGES).is_file():
        files = _read_small_files(checkpoint)
        if files.class_name == CLIP_CLASS:
            return TokenizerFile(checkpoint / CLIP_VOCABULARY, files, rules_of(files, settings))
    found = next((name for name in OTHER_FILES if (checkpoint / name).is_file()), None)
    remedy = (
        f'; it has {found}. Write one: pip install sentencepiece protobuf, then python -c "from transformers '
        f"import AutoTokenizer as A; A.from_pretrained('{checkpoint}').save_pretrained('{checkpoint}')\""
    )
    copied = "; copy the tokenizer's files from the model that this one was trained from"
    raise ModelUnavailable(f"no readable {TOKENIZER_FILE} in {checkpoint}{remedy if found else copied}")


def _tokenizer_of(static: StaticModel, settings: TokenizerSettings) -> TokenizerFile:
    """Return the file of a static model; its library reads no other, and adds no special tokens."""
    if settings != AS_FILES_SAY:
        raise ModelUnavailable(
            f"{static.tokenizer} is of a static model, which has no special tokens; leave out "
            "`add_bos_token` and `add_eos_token`"
        )
    return TokenizerFile(static.tokenizer, TokenizerFiles({}, {}, {}, {}, {}), TokenizerRules(special=False))


def _read_small_files(checkpoint: Path) -> TokenizerFiles:
    config, named, added, model, sentence = (
        read_json_object(checkpoint / f"{name}.json") for name in SMALL_FILES
    )
    library = written_with(model, sentence)
    settings = read_network_settings(lambda name: read_json_object(checkpoint / name))
    config |= processor_arguments(settings)
    if "added_tokens_decoder" in config:
        # Newer versions of the library state all in one file, and may leave the other two behind.
        return TokenizerFiles(config, model, config, {}, settings, library)
    return TokenizerFiles(config, model, {**config, **named}, added, settings, library)


def _read(file: TokenizerFile, edited: EditedTokenizer) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(edited.content)
    except Exception as error:
        # The Rust code raises a bare Exception for a broken file.
        raise ModelUnavailable(f"no readable {file.path.name} in {file.path.parent}") from error
    if not file.rules.special:
        tokenizer.post_processor = None
    tokenizer.encode_special_tokens = file.rules.splits_special
    for word, id_ in edited.added.items():
        if tokenizer.token_to_id(word) != id_:
            raise ModelUnavailable(
                f"the files next to {file.path} give the token {word} the id {id_}, and the vocabulary in it "
                "does not reach that far"
            )
    return tokenizer


def _register_marker(tokenizer: Tokenizer, marker: str) -> None:
    """Register a marker as a special token if its name, or its first word, is in the vocabulary."""
    for name in (marker, marker.split(None, 1)[0]):
        if tokenizer.token_to_id(name) is not None:
            if tokenizer.encode(name, add_special_tokens=False).tokens != [name]:
                tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])
            return


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    return copy


def _tokens_of(text: str, encoding: Encoding, *, pieces: bool) -> list[Token]:
    byte_at = _byte_offsets(text)
    return [
        Token(id_, token, special=True)
        if special
        else Token(id_, token if pieces else text[a:b], special=False, start=byte_at[a], stop=byte_at[b])
        for id_, token, special, (a, b) in zip(
            encoding.ids,
            encoding.tokens,
            encoding.special_tokens_mask,
            encoding.offsets,
            strict=True,
        )
    ]


def _byte_offsets(text: str) -> Sequence[int]:
    """Return the UTF-8 offset of each character, and the length of the text as the last item."""
    if text.isascii():
        return range(len(text) + 1)
    offsets = [0]
    for character in text:
        offsets.append(offsets[-1] + len(character.encode()))
    return offsets
