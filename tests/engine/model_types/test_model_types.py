"""Every type of network that reads texts is served as transformers computes it, or refused with a reason."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.model_types.cases import case_names, outcome_of
from tests.engine.model_types.comparison import Outcome
from tests.engine.model_types.page import PAGE, types_page

# Some networks compute token by token in Python.
pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Compute on one thread: teams of threads cost these sizes more than they gain."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


@cache
def outcome(name: str, folders: Path) -> Outcome:
    return outcome_of(name, folders / name)


@pytest.mark.parametrize("name", case_names())
def test_a_type_is_equal_or_refused_with_its_reason(name: str, folders: Path) -> None:
    found = outcome(name, folders)

    assert "wrong" != found.state, found.detail
    assert found.detail


def test_most_types_are_compared(folders: Path) -> None:
    states = [outcome(name, folders).state for name in case_names()]

    assert states.count("equal") >= 200


def test_the_page_shows_the_outcomes(folders: Path) -> None:
    page = types_page([outcome(name, folders) for name in case_names()])

    assert page == PAGE.read_text(encoding="utf-8"), "python -m tests.engine.model_types --write"
