"""Command that prints the outcome of types of networks, and writes docs/model-types.md."""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.engine.model_types.cases import case_names, outcome_of
from tests.engine.model_types.page import PAGE, types_page


def main(arguments: Sequence[str]) -> int:
    """Print a line for each case; return 1 if one is wrong."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = [argument for argument in arguments if argument != "--write"] or case_names()
    outcomes = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = outcome_of(name, Path(folder) / "checkpoint")
        outcomes.append(outcome)
        packed = {True: "packed", False: "padded", None: ""}[outcome.packed]
        print(f"{outcome.state:13} {packed:6} {name:32} {outcome.detail}", flush=True)  # noqa: T201
    print(dict(Counter(outcome.state for outcome in outcomes)))  # noqa: T201 - the result of a command
    if "--write" in arguments:
        PAGE.write_text(types_page(outcomes), encoding="utf-8")
    return int(any(outcome.state == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
