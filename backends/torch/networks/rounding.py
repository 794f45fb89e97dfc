"""Numbers of tokens of a pass, of which few are different: code is generated for each. Pure."""

# Numbers of tokens are rounded up to a multiple of this, smaller ones to this many binary digits.
TOKENS_MULTIPLE, TOKENS_DIGITS = 32, 4


def spare_tokens(tokens: int) -> int:
    """Return the tokens that round a number up to four binary digits, or to a multiple of 32.

    oneDNN generates code for every number of rows that it has not multiplied recently. That takes up to half
    as long as the product itself, longer than a small product, and occupies half a megabyte.
    """
    return -tokens % min(TOKENS_MULTIPLE, 1 << max(0, tokens.bit_length() - TOKENS_DIGITS))
