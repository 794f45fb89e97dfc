"""The journal of a chunk: results outlast a kill at any byte, and are composed in their order."""

import random
import resource
import tracemalloc
from pathlib import Path

import pytest

from gateway.batches.journal import Journal
from gateway.batches.lines import LineResult
from gateway.batches.records import PARTS


def result(number: int, part: str = "out") -> LineResult:
    return LineResult(part, f"result {number}\n".encode(), tokens=number, cached_tokens=1)  # type: ignore[arg-type]


def test_composes_parts_in_the_order_of_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    numbers = list(range(100))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        journal.append([(number, result(number, "err" if number % 10 == 0 else "out"))])

    for part in PARTS:
        journal.compose(part, tmp_path / part)

    whole = [f"result {number}" for number in range(100)]
    assert (tmp_path / "err").read_text().splitlines() == whole[::10]
    assert (tmp_path / "out").read_text().splitlines() == [text for n, text in enumerate(whole) if n % 10]
    assert {part: (tmp_path / part).stat().st_size for part in PARTS} == {
        part: journal.size_of(part) for part in PARTS
    }
    counts = journal.counts()
    assert (counts.completed, counts.failed, counts.tokens, counts.cached_tokens) == (90, 10, 4950, 100)
    journal.close()


def test_adopts_every_whole_result_of_an_attempt_that_was_cut_anywhere(tmp_path: Path) -> None:
    first = Journal(tmp_path / "first")
    ends = []
    for number in range(5):
        first.append([(number, result(number))])
        ends.append((tmp_path / "first").stat().st_size)
    first.close()
    data = (tmp_path / "first").read_bytes()
    for cut in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        second = Journal(tmp_path / f"second-{cut}")
        second.adopt(tmp_path / "cut")
        assert len(second.entries) == sum(end <= cut for end in ends)
        second.close()


def test_ignores_what_follows_a_damaged_result(tmp_path: Path) -> None:
    first = Journal(tmp_path / "first")
    first.append([(number, result(number)) for number in range(3)])
    first.close()
    data = bytearray((tmp_path / "first").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "first").write_bytes(data)
    second = Journal(tmp_path / "second")

    second.adopt(tmp_path / "first")

    assert list(second.entries) == [0]
    second.close()


def test_a_full_disk_leaves_no_half_result(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([(0, result(0))])
    size = (tmp_path / "journal").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel writes the bytes that fit, and then fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            journal.append([(1, result(1)), (2, result(2))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "journal").stat().st_size == size + 5
    assert list(journal.entries) == [0]

    journal.append([(1, result(1))])
    journal.close()

    second = Journal(tmp_path / "second")
    second.adopt(tmp_path / "journal")
    assert list(second.entries) == [0, 1]
    second.close()


def test_an_attempt_that_was_interrupted_goes_on_in_its_own_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal")
    first.append([(number, result(number)) for number in range(700)])
    first.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(b"half a result")

    again = Journal(tmp_path / "journal")
    assert sorted(again.entries) == list(range(700))
    again.append([(700, result(700))])
    again.compose("out", tmp_path / "out")
    again.close()

    assert (tmp_path / "out").read_text().splitlines() == [f"result {number}" for number in range(701)]


def test_keeps_no_second_copy_of_large_results(tmp_path: Path) -> None:
    large = 32 * 1024 * 1024
    journal = Journal(tmp_path / "journal")
    results = [(number, LineResult("out", b"x" * large)) for number in range(2)]
    tracemalloc.start()
    journal.append(results)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    journal.close()

    assert peak < large // 4
    assert (tmp_path / "journal").stat().st_size > 2 * large
