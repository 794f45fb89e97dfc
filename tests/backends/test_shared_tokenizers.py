"""Tokenizers in use are shared: a reload that opens the same file again takes no more memory."""

import gc
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer import RECENT_MAX, open_counter, open_tokenizer


@pytest.fixture
def checkpoint(small_files: str, tmp_path: Path) -> Path:
    """Return a folder with a tokenizer that the test may change."""
    shutil.copy(Path(small_files) / "tokenizer.json", tmp_path)
    return tmp_path


def test_equal_files_in_use_are_opened_once(checkpoint: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: open_tokenizer(checkpoint, 16), range(8)))

    assert 1 == len(set(map(id, opened)))
    assert opened[0] is not open_tokenizer(checkpoint, 8)
    assert open_counter(checkpoint) is open_counter(checkpoint)


def test_changed_file_is_opened_again(checkpoint: Path) -> None:
    before = open_tokenizer(checkpoint, 16)
    os.utime(checkpoint / "tokenizer.json", ns=(1, 1))

    assert before is not open_tokenizer(checkpoint, 16)


def test_only_the_last_unused_tokenizers_stay_open(checkpoint: Path) -> None:
    unused = [weakref.ref(open_tokenizer(checkpoint, 16 + number)) for number in range(RECENT_MAX + 1)]
    gc.collect()

    assert [True, *[False] * RECENT_MAX] == [each() is None for each in unused]


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no readable tokenizer\.json"):
        open_tokenizer(tmp_path, 16)
