"""What `gateway embed` never deletes: folders, files and links next to an output that no run has made."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.embed.conftest import Command
from tests.fakes.embedder import Reply

RUN = ("in.jsonl", "--to", "out.jsonl")
OVERWRITING = (*RUN, "--overwrite")


@pytest.fixture(autouse=True)
def rows(command: Command) -> None:
    command.write_rows("in.jsonl", [{"text": "one"}, {"text": "two"}])


def precious(folder: Path) -> Path:
    """Make a folder with a person's file in it, whose name ends as those of unfinished files."""
    folder.mkdir(parents=True)
    (folder / "thesis.tmp").write_text("precious")
    return folder


def is_whole(folder: Path) -> bool:
    """Return whether a folder is as `precious` has made it."""
    return [path.name for path in folder.iterdir()] == ["thesis.tmp"]


@pytest.mark.parametrize("words", [RUN, OVERWRITING])
def test_a_folder_that_is_of_no_run_is_left_as_it_is(command: Command, words: Sequence[str]) -> None:
    folder = precious(command.folder / "out.jsonl.parts")
    outcome = command.run(*words)
    assert (outcome.status, "none is the manifest of a run" in outcome.errors) == (1, True)
    assert is_whole(folder)
    assert not command.server.texts


def test_a_folder_with_another_manifest_is_left_as_it_is(command: Command) -> None:
    folder = precious(command.folder / "out.jsonl.parts")
    (folder / "manifest.json").write_text('{"name": "a site"}')
    outcome = command.run(*OVERWRITING)
    assert (outcome.status, "manifest.json cannot be read" in outcome.errors) == (1, True)
    assert ["manifest.json", "thesis.tmp"] == sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("words", [RUN, OVERWRITING])
def test_a_link_is_not_followed(command: Command, words: Sequence[str]) -> None:
    folder = precious(command.folder / "elsewhere")
    link = command.folder / "out.jsonl.parts"
    link.symlink_to(folder)
    outcome = command.run(*words)
    assert (outcome.status, "is a symbolic link" in outcome.errors) == (1, True)
    assert link.is_symlink()
    assert is_whole(folder)


def test_a_file_in_place_of_the_folder_is_left_as_it_is(command: Command) -> None:
    path = command.write("out.jsonl.parts", "precious")
    outcome = command.run(*OVERWRITING)
    assert (outcome.status, "is no folder" in outcome.errors) == (1, True)
    assert path.read_text() == "precious"


def test_other_files_among_the_parts_stay(command: Command) -> None:
    folder = command.folder / "out.jsonl.parts"

    def add(_: Sequence[str]) -> Reply | None:
        if not (folder / "notes").exists():
            precious(folder / "notes")
        return None

    command.server.hook = add
    assert command.run(*RUN).status == 0
    assert ["notes"] == [path.name for path in folder.iterdir()]
    assert is_whole(folder / "notes")
    again = command.run(*RUN)
    assert (again.status, again.summary["finished_now"]) == (0, False)
    assert is_whole(folder / "notes")


@pytest.mark.parametrize("words", [RUN, OVERWRITING])
def test_a_file_with_the_name_of_a_note_is_left_as_it_is(command: Command, words: Sequence[str]) -> None:
    path = command.write(".out.jsonl.embedded", "precious")
    outcome = command.run(*words)
    assert (outcome.status, "is no note of a run" in outcome.errors) == (1, True)
    assert path.read_text() == "precious"


def test_a_link_with_the_name_of_a_note_is_not_followed(command: Command) -> None:
    path = command.folder / ".out.jsonl.embedded"
    path.symlink_to(command.write("mine", "precious"))
    assert command.run(*OVERWRITING).status == 1
    assert (path.is_symlink(), path.read_text()) == (True, "precious")


def test_a_note_is_written_through_no_link(command: Command) -> None:
    mine = command.write("mine", "precious")
    (command.folder / ".out.jsonl.embedded.tmp").symlink_to(mine)
    assert command.run(*RUN).status == 0
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("output", ["out.jsonl", "out.lance"])
def test_another_folder_is_not_replaced(command: Command, output: str) -> None:
    folder = precious(command.folder / output)
    outcome = command.run("in.jsonl", "--to", output, "--overwrite")
    assert (outcome.status, "is a folder, and no dataset of Lance" in outcome.errors) == (1, True)
    assert is_whole(folder)


def test_a_dataset_is_replaced(command: Command) -> None:
    words = ("in.jsonl", "--to", "out.lance", "--overwrite")
    assert [0, 0] == [command.run(*words).status for _ in range(2)]
    assert len(command.rows("out.lance")) == 2


@pytest.mark.parametrize("words", [RUN, OVERWRITING])
def test_a_link_is_not_replaced(command: Command, words: Sequence[str]) -> None:
    link = command.folder / "out.jsonl"
    link.symlink_to(command.folder / "not-yet")
    outcome = command.run(*words)
    assert (outcome.status, "is a symbolic link" in outcome.errors) == (1, True)
    assert link.is_symlink()


def test_an_output_that_appears_meanwhile_is_not_replaced(command: Command) -> None:
    def write(_: Sequence[str]) -> Reply | None:
        command.write("out.jsonl", "precious")
        return None

    command.server.hook = write
    outcome = command.run(*RUN)
    assert (outcome.status, "--overwrite replaces it" in outcome.errors) == (1, True)
    assert (command.folder / "out.jsonl").read_text() == "precious"
