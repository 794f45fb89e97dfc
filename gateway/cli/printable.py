"""Text of servers and files for a terminal. Pure."""


def printable(text: str) -> str:
    """Return a text with a space in place of each character that a terminal could take for a command."""
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)
