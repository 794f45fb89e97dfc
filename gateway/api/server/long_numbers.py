"""Search for numbers of so many digits that parsing them takes quadratic time. Pure.

msgspec turns an integer of up to 4,300 digits into Python's where its type has no upper bound: 7,700 of them,
which are 33 MB, took 0.7 s.
"""

import numpy as np
from numpy.typing import NDArray

# No number with fewer digits in a row is found, and every one with nearly twice as many.
DIGITS = 32
# Eight bytes at once, each of them true.
ALL_TRUE = np.uint64(0x0101010101010101)


def has_long_number(characters: NDArray[np.uint8]) -> bool:
    """Return whether one of the blocks of `DIGITS` characters contains digits only."""
    blocks = characters[: len(characters) // DIGITS * DIGITS]
    # Of most texts this is enough to see that there is none.
    if not (_are_digits(blocks[::DIGITS]) & _are_digits(blocks[DIGITS // 2 :: DIGITS])).any():
        return False
    eights = _are_digits(blocks).view(np.uint64) == ALL_TRUE
    return bool((eights[0::4] & eights[1::4] & eights[2::4] & eights[3::4]).any())


def _are_digits(characters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    # Unsigned: characters before "0" become large.
    return (characters - np.uint8(ord("0"))) < 10
