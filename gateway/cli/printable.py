"""Text of servers and files for a terminal. Pure."""


def printable(text: str) -> str:
    """Return a text with a space in place of each character that a terminal could take for a command."""
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)


def plain(text: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)
