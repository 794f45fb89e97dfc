"""Retired names and idioms: each entry of these lists once made code or documents hard to read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("gateway", "backends", "loadtest")
SUFFIXES = {".py", ".lua", ".js"}

# Identifiers whose replacements are the field's terms: `capabilities`, `replica`, `RequestContext`, `Owner`.
RETIRED_NAMES = (
    r"\btold\b",
    r"\b\w+_told\b|\btold_\w+\b",
    r"\bfor one in\b",
    r"\bone\.\w",
    r"\bStraight\b|\bSTRAIGHT\b|\bTakingOver\b|\bAtWork\b|\bKeptAdditions\b|\bAddingOrNot\b",
    r"\b[Pp]assengers?\b|\b[Cc]argo\b|\bBoundsNow\b|\bRedisDoor\b|\bHttpDoor\b|\bStoreAway\b",
)
# Words and turns that standard technical English says with a noun, a subject and a standard verb.
RETIRED_IDIOMS = (
    r"\b[Aa]new\b",
    r"\b(?:whoever|Whoever|whomever)\b",
    r"\b[Nn]obody\b|\b[Ss]omebody\b|\b[Ee]verybody\b",
    r"\btells? (?:of|a|an|the|it|this|that|their|its|them|no|nothing|each|every)\b",
    r"\btells? (?:what|how|which|where|whether|when|why)\b",
    r"\b(?:is|are|was|were|be|been|being) told\b",
    r"\bsays? so\b",
    r"\bhears? (?:of|it|that|whose|what|nothing)\b",
    r"\bbeside\b",
)
DOCSTRING_STARTS = re.compile(r'"""(?:What|Who|Whom|Whose|Whether|How|Where|Which|When)\b')


def code_files() -> Iterator[Path]:
    for folder in CODE:
        yield from (
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in SUFFIXES and "node_modules" not in path.parts
        )


def documents() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "loadtest").rglob("*.md"))
    yield from sorted((ROOT / "changes").glob("*.md"))


def lines_with(pattern: str, paths: Iterator[Path]) -> list[str]:
    retired = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if retired.search(line)
    ]


@pytest.mark.parametrize("pattern", RETIRED_NAMES)
def test_code_uses_no_retired_name(pattern: str) -> None:
    assert [] == lines_with(pattern, code_files())


@pytest.mark.parametrize("pattern", RETIRED_IDIOMS)
def test_code_uses_no_retired_idiom(pattern: str) -> None:
    assert [] == lines_with(pattern, code_files())


@pytest.mark.parametrize("pattern", RETIRED_IDIOMS)
def test_documents_use_no_retired_idiom(pattern: str) -> None:
    assert [] == lines_with(pattern, documents())


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = lines_with(DOCSTRING_STARTS.pattern, (path for path in code_files() if path.suffix == ".py"))
    assert [] == found
