"""The console explains every kind of error that a call can end with."""

import re
from pathlib import Path

from gateway.errors import FACTS

TABLE = Path(__file__).parents[2] / "gateway/api/operators/console/src/lib/error-kinds.ts"
# Of calls whose connection ended before the reply.
NO_ERROR = {"cancelled"}


def test_console_explains_every_kind_of_error() -> None:
    explained = set(re.findall(r"^  (\w+): kind\(", TABLE.read_text(), re.MULTILINE))

    assert set(FACTS) | NO_ERROR == explained
