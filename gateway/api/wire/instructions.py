"""Instruction of a request: its bound. Pure."""

from gateway.errors import InvalidInput

# Longest instruction in UTF-8. It is a part of every text, so that a long one would multiply the tokens.
INSTRUCTION_BYTES_MAX = 4096


def check_instruction(instruction: str | None, *, param: str = "instruction") -> str | None:
    """Return a caller's instruction, or None for an empty one, which is the same as none.

    Raises: InvalidInput.
    """
    if not instruction:
        return None
    if len(instruction.encode()) > INSTRUCTION_BYTES_MAX:
        raise InvalidInput(
            f"`{param}` is longer than {INSTRUCTION_BYTES_MAX} bytes: shorten it", param="instruction"
        )
    return instruction
