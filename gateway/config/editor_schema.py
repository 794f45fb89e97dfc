"""The JSON Schema of router.yaml that is shipped for editors."""

from pathlib import Path

NAME = "router.schema.json"


def editor_schema() -> str:
    """Return the text of the JSON Schema."""
    return Path(__file__).with_name(NAME).read_text(encoding="utf-8")


def editor_line(place: str = NAME) -> str:
    """Return the comment by which editors find the schema. place: its path from the folder of the file."""
    return f"# yaml-language-server: $schema={place}\n"
