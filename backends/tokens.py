"""Text to token ids with a checkpoint's own tokenizer; the one door to the `tokenizers` package.

Knows nothing of torch: the gateway counts with it, the engine computes with it.
Rule: every function here is CPU-bound and releases the GIL inside; call it off the event loop,
but for a few words.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer

from backends.contract import Token, Truncate
from backends.errors import InvalidWork, ModelUnavailable
from backends.texts import CHARACTERS_PER_TOKEN, TOKEN_ID_LIMIT, ModelInput, clip_text


class TokenSequences(msgspec.Struct, frozen=True):
    """Token ids of each input, specials included, none longer than the model.

    type_ids tell the two halves of a pair apart; truncated are indices of inputs that were cut.
    """

    ids: list[list[int]]
    type_ids: list[list[int]]
    truncated: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each input."""
        return [len(ids) for ids in self.ids]


class Vocabulary:
    """What turns ids back into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids. Raises: InvalidWork where an id is none of this vocabulary."""
        known = {id_ for one in ids for id_ in one if self._is_known(id_)}
        for index, one in enumerate(ids):
            strange = next((id_ for id_ in one if id_ not in known), None)
            if strange is not None:
                raise InvalidWork(
                    f"input {index} holds {strange}, which is not the id of a token of this model"
                )
        lists = [list(one) for one in ids]
        return self._tokenizer.decode_batch(lists, skip_special_tokens=skip_special_tokens)

    def _is_known(self, id_: int) -> bool:
        # A vocabulary may have gaps, so that its size tells nothing of an id.
        return 0 <= id_ < TOKEN_ID_LIMIT and self._tokenizer.id_to_token(id_) is not None


class TextTokenizer:
    """One checkpoint's tokenizer, bound to the model's maximum length."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        # Checkpoints carry padding and truncation of their training in the file; ours are explicit.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.max_tokens = max_tokens
        self._whole = tokenizer
        self._cutters = {
            side: _cutting(tokenizer, max_tokens, side) for side in (Truncate.LEFT, Truncate.RIGHT)
        }

    @property
    def vocabulary_size(self) -> int:
        """The size of the vocabulary."""
        return self._whole.get_vocab_size()

    def encode(self, texts: Sequence[ModelInput], truncate: Truncate) -> TokenSequences:
        """Raises: InvalidWork where truncate is ERROR and an input is longer than the model."""
        return self._encode(list(texts), truncate)

    def encode_pairs(self, query: str, documents: Sequence[str], truncate: Truncate) -> TokenSequences:
        """Query and document together, the longer of the two cut first. Raises: InvalidWork."""
        return self._encode([(query, document) for document in documents], truncate)

    def encode_inputs(self, items: Sequence[ModelInput], truncate: Truncate) -> TokenSequences:
        """Texts and pairs of texts, as they come. Raises: InvalidWork, as `encode` does."""
        return self._encode(items, truncate)

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """As `Vocabulary.decode` does."""
        return Vocabulary(self._whole).decode(ids, skip_special_tokens=skip_special_tokens)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as the model would see it, cut where it is too long."""
        return self._encode(list(texts), Truncate.RIGHT).lengths

    def explain(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[Token]]:
        """The tokens of each text as TEI's /tokenize shows them; nothing is cut."""
        encodings = self._whole.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [_explained(text, one) for text, one in zip(texts, encodings, strict=True)]

    def tokens_with_starts(self, text: str) -> list[tuple[int, int]]:
        """(id, first character) of each token of a text, without specials around it; nothing is cut."""
        encoding = self._whole.encode(text, add_special_tokens=False)
        return [(id_, start) for id_, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without specials around it; nothing is cut."""
        return [one.ids for one in self._whole.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_id(self, token: str) -> int | None:
        """The id of a token; None where the vocabulary has none of that name."""
        return self._whole.token_to_id(token)

    def with_max_tokens(self, max_tokens: int, markers: Sequence[str] = ()) -> "TextTokenizer":
        """The same with another maximum. markers: read as one token where the vocabulary has them."""
        tokenizer = Tokenizer.from_str(self._whole.to_str())
        for marker in markers:
            _keep_whole(tokenizer, marker)
        return TextTokenizer(tokenizer, max_tokens)

    def _encode(self, items: Sequence[ModelInput], truncate: Truncate) -> TokenSequences:
        if truncate is Truncate.ERROR:
            self._refuse_books(items)
        shortened = [self._precut(item, truncate) for item in items]
        cut = {i for i, item in enumerate(items) if shortened[i] is not item}
        encodings: list[Encoding] = self._whole.encode_batch_fast(shortened)
        too_long = [i for i, one in enumerate(encodings) if len(one.ids) > self.max_tokens]
        if too_long and truncate is Truncate.ERROR:
            raise InvalidWork(
                f"input {too_long[0]} has {len(encodings[too_long[0]].ids)} tokens, "
                f"the model takes {self.max_tokens}"
            )
        if too_long:
            fitted = self._cutters[truncate].encode_batch_fast([shortened[i] for i in too_long])
            for index, encoding in zip(too_long, fitted, strict=True):
                encodings[index] = encoding
        return TokenSequences(
            [one.ids for one in encodings],
            [one.type_ids for one in encodings],
            tuple(sorted({*too_long, *cut})),
        )

    def _refuse_books(self, items: Sequence[ModelInput]) -> None:
        """What is certainly too long need not be tokenized to be refused."""
        most = self.max_tokens * CHARACTERS_PER_TOKEN
        for index, item in enumerate(items):
            characters = len(item) if isinstance(item, str) else len(item[0]) + len(item[1])
            if characters > most:
                raise InvalidWork(
                    f"input {index} has {characters} characters, the model takes {self.max_tokens} tokens"
                )

    def _precut(self, item: ModelInput, truncate: Truncate) -> ModelInput:
        """The item itself where it is short enough."""
        if isinstance(item, str):
            return clip_text(item, self.max_tokens, truncate)
        query, document = item
        short = (
            clip_text(query, self.max_tokens, truncate),
            clip_text(document, self.max_tokens, truncate),
        )
        return item if short == item else short


def open_tokenizer(checkpoint: Path, max_tokens: int) -> TextTokenizer:
    """Read a checkpoint's tokenizer.json.

    Raises: ModelUnavailable.
    """
    return TextTokenizer(_read(checkpoint), max_tokens)


def open_vocabulary(checkpoint: Path) -> Vocabulary:
    """Read a checkpoint's tokenizer.json, to decode only.

    Raises: ModelUnavailable.
    """
    return Vocabulary(_read(checkpoint))


def _read(checkpoint: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:
        # The Rust side raises bare Exception for a missing and for a broken file alike.
        raise ModelUnavailable(f"no readable tokenizer.json in {checkpoint}") from error


def _keep_whole(tokenizer: Tokenizer, marker: str) -> None:
    """Have a marker that is a token read as one: by its own name, or by its first word."""
    for name in (marker, marker.split(None, 1)[0]):
        if tokenizer.token_to_id(name) is not None:
            if tokenizer.encode(name, add_special_tokens=False).tokens != [name]:
                tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])
            return


def _cutting(tokenizer: Tokenizer, max_tokens: int, side: Truncate) -> Tokenizer:
    cutter = Tokenizer.from_str(tokenizer.to_str())
    cutter.enable_truncation(max_tokens, strategy="longest_first", direction=side.value)
    return cutter


def _explained(text: str, encoding: Encoding) -> list[Token]:
    byte_at = _byte_offsets(text)
    return [
        Token(id_, token, special=True)
        if special
        else Token(id_, token, special=False, start=byte_at[a], stop=byte_at[b])
        for id_, token, special, (a, b) in zip(
            encoding.ids,
            encoding.tokens,
            encoding.special_tokens_mask,
            encoding.offsets,
            strict=True,
        )
    ]


def _byte_offsets(text: str) -> Sequence[int]:
    """Where each character starts in UTF-8, and where the text ends."""
    if text.isascii():
        return range(len(text) + 1)
    offsets = [0]
    for character in text:
        offsets.append(offsets[-1] + len(character.encode()))
    return offsets
