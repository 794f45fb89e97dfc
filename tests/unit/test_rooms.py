"""pytest's option --room: which test files belong to a room."""

from pathlib import Path

import pytest

from tests.conftest import pytest_configure
from tests.rooms import ROOT, belongs, rooms

TESTS = ROOT / "tests"


@pytest.mark.parametrize("room", ["lane", "dispatch", "api/dialects", "api", "backends/torch", "loadtest"])
def test_folders_and_loose_modules_are_rooms(room: str) -> None:
    assert room in rooms()


def test_every_room_has_a_test_file() -> None:
    files = list(TESTS.rglob("test_*.py"))

    assert [] == [room for room in rooms() if not any(belongs(file, room) for file in files)]


def test_a_file_in_the_folder_of_the_name_belongs() -> None:
    assert belongs(TESTS / "backends/test_replies.py", "backends")
    assert not belongs(TESTS / "backends/test_replies.py", "lane")


def test_a_file_named_after_a_module_belongs() -> None:
    assert belongs(TESTS / "api/test_lane.py", "lane")
    assert belongs(TESTS / "api/test_cohere_dialect.py", "api/dialects")


@pytest.mark.parametrize(
    "line",
    [
        "from gateway.lane.lane import Lane",
        "from gateway.lane import (\n    lane,\n)",
        "from gateway import lane",
        "import gateway.lane.lane as lane",
        "    from gateway.lane import lane",
    ],
)
def test_a_file_that_imports_the_room_belongs(line: str, tmp_path: Path) -> None:
    file = tmp_path / "test_any.py"
    file.write_text(line)

    assert belongs(file, "lane")
    assert not belongs(file, "routing")


def test_unknown_room_is_refused_with_the_list() -> None:
    config = pytest.Config.fromdictargs({"room": "kitchen"}, [])

    with pytest.raises(pytest.UsageError, match=r"no room 'kitchen'.*\blane, ") as refused:
        pytest_configure(config)
    assert str(refused.value).count(", ") == len(rooms()) - 1
