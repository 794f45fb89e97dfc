"""The console's dark colors stand twice: for a chosen theme, and for that of the system."""

import re
from pathlib import Path

TOKENS = Path(__file__).parents[2] / "gateway/api/operators/console/src/styles/tokens.css"


def test_the_dark_colors_of_the_system_are_those_of_the_theme() -> None:
    blocks = re.findall(r":root[^{]*\{([^}]*color-scheme: dark[^}]*)\}", TOKENS.read_text())
    chosen, of_system = [[line.strip() for line in block.splitlines() if line.strip()] for block in blocks]
    assert chosen == of_system
    assert len(chosen) > 20
