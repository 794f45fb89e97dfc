"""What can be said of a text without a tokenizer. Pure."""

from collections.abc import Sequence

from backends.contract import Truncate

# TEI looks at no more characters than this for each token a model may use: so that a book costs what a
# page does. Nothing that a model would have seen is lost.
CHARACTERS_PER_TOKEN = 250
# Specials that a tokenizer adds to an input, at most: [CLS] a [SEP] b [SEP], and one to spare.
SPECIAL_TOKENS = 4


def precut(text: str, max_tokens: int, truncate: Truncate) -> str:
    """The part of a text that its first (or last) max_tokens tokens can come from."""
    most = max_tokens * CHARACTERS_PER_TOKEN
    if truncate is Truncate.ERROR or len(text) <= most:
        return text
    return text[-most:] if truncate is Truncate.LEFT else text[:most]


def most_tokens(text: str) -> int:
    """An upper bound: no tokenizer makes more tokens of a text than its UTF-8 bytes, and specials."""
    return len(text.encode()) + SPECIAL_TOKENS


def surely_whole(texts: Sequence[str], max_tokens: int) -> bool:
    """Whether every text is so short that no tokenizer could make it too long."""
    return all(most_tokens(text) <= max_tokens for text in texts)
