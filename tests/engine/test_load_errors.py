"""Unexpected errors while a model is opened, and results that are no numbers."""

from pathlib import Path

import pytest
import torch

from backends.errors import ModelUnavailable
from backends.torch.refusals import describe_error, refuse_on_error
from tests.engine.checkpoints import ENCODERS, make_encoder
from tests.engine.engines import load_tiny


def test_an_unexpected_error_carries_its_first_line() -> None:
    with (
        pytest.raises(ModelUnavailable, match=r"it failed: ValueError: give one of two; fetch it again$"),
        refuse_on_error("it failed", "fetch it again"),
    ):
        raise ValueError("\ngive one of two\nTraceback")


def test_an_error_without_a_message_is_described_by_its_type() -> None:
    assert describe_error(ValueError()) == "ValueError"


def test_exhausted_memory_and_refusals_pass_unchanged() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("full"), ModelUnavailable("no such folder")):
        with pytest.raises(type(error)) as raised, refuse_on_error("it failed"):
            raise error
        assert raised.value is error


def test_a_first_pass_that_fails_is_a_refusal(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)

    def fail(*_: object) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr("backends.torch.heads.Encoder.run", fail)

    with pytest.raises(ModelUnavailable, match=r"first passes .* failed: IndexError: index out of range"):
        load_tiny(folder)


def test_weights_that_overflow_in_the_number_format_are_refused(minilm: Path, tmp_path: Path) -> None:
    config = ENCODERS["modernbert"][0]()
    config.initializer_range = 2e4
    folder = make_encoder(config, minilm, tmp_path)

    load_tiny(folder, "float32")
    with pytest.raises(ModelUnavailable, match="results are not finite numbers"):
        load_tiny(folder, "float16")
