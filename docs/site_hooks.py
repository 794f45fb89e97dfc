"""Adjustments to the pages when mkdocs builds the site.

The documents are read in two places: in the repository, where a link may lead to any file, and on the site,
which holds docs/ only. On the site a link that leaves docs/ becomes its text with the file's path.
tests/test_documents.py checks that the file exists.
"""

import re
from typing import Any

# [text](../path "title"), with one `../` for each folder that the page is deep.
OUTSIDE_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w./-]+\.\w+)(?:#[\w-]+)?\)")
# [12]: ../tests/api/test_x.py "test_name"
TEST_REFERENCE = re.compile(r'^\[(\d+)\]: \.\./(tests/[\w/]+\.py) "(\w+)"$', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links that lead out of docs/, and list the tests that a page refers to as a table."""
    tests = TEST_REFERENCE.findall(markdown)
    if tests:
        rows = "".join(f"| {number} | `{path}` | `{name}` |\n" for number, path, name in tests)
        markdown = TEST_REFERENCE.sub("", markdown).rstrip()
        markdown = re.sub(r"\[(\d+)\](?!\()", r"[\1](#tests)", markdown)
        markdown += f"\n\n## Tests\n\n| number | file | test |\n|---|---|---|\n{rows}"
    return OUTSIDE_LINK.sub(_text_with_path, markdown)


def _text_with_path(link: re.Match[str]) -> str:
    """Return the link's text, followed by the path where the text is not that path."""
    text, path = link.groups()
    if text.strip("`") == path:
        return text
    return f"{text} (`{path}` in the repository)"
