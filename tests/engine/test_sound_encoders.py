"""Dual encoders of texts and sound against transformers: recordings of many formats, alone and in batches."""

import asyncio
import base64
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from backends.contract import Audio, Embed, EmbedParts, EmbedReply, Operation, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable, UnsupportedWork
from backends.recipe.options import DTypeName
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.media.features import open_sound_reader
from backends.torch.media.sounds import open_recording
from backends.torch.passes.engine import Engine
from backends.torch.stock.architectures import read_config
from tests.engine.dual_checkpoints import DualModel, make_dual, sound_vectors, text_vectors
from tests.engine.engines import cosines, engine_on, load_tiny, run_work
from tests.engine.texts import PHRASES

pytest.importorskip("soundfile", reason="sound needs the extra `media`")
pytest.importorskip("soxr", reason="sound needs the extra `media`")

from transformers.audio_utils import load_audio

from tests.engine.sounds import recorded, recordings, tone

TEXTS = [*PHRASES[:6], "a"]
LEAST_COSINE: dict[DTypeName, float] = {"float32": 0.9999, "bfloat16": 0.9995}
RATE = 48_000


@pytest.fixture(scope="module")
def clap(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DualModel, Path]:
    folder = tmp_path_factory.mktemp("sound") / "clap"
    return make_dual("clap", minilm, folder), folder


@pytest.fixture(scope="module")
def engine(clap: tuple[DualModel, Path]) -> Engine:
    return engine_on(load_tiny(clap[1]))


@cache
def parts() -> tuple[tuple[Audio], ...]:
    return tuple((Audio(data, "audio/wav"),) for data in recordings().values())


@cache
def reference_sounds() -> list[object]:
    return [
        load_audio(base64.b64encode(data).decode(), sampling_rate=RATE, backend="soundfile")
        for data in recordings().values()
    ]


def run(engine: Engine, work: EmbedParts) -> EmbedReply:
    return asyncio.run(run_work(engine, work, EmbedReply))


def test_recordings_have_the_features_of_transformers_bit_for_bit(clap: tuple[DualModel, Path]) -> None:
    model, folder = clap
    reader = open_sound_reader(folder, read_config(folder))
    assert len(parts()) >= 50

    for (part,), samples in zip(parts(), reference_sounds(), strict=True):
        features = reader.read(part, Truncate.ERROR).sequence.features
        assert features is not None
        expected = model.processor(samples, sampling_rate=RATE, return_tensors="pt")
        assert features.arrays.keys() == expected.keys()
        for key, array in features.arrays.items():
            np.testing.assert_array_equal(array, expected[key].numpy())


@pytest.mark.parametrize("dtype", LEAST_COSINE)
def test_texts_and_recordings_have_the_vectors_of_transformers(
    dtype: DTypeName, clap: tuple[DualModel, Path]
) -> None:
    model, folder = clap
    engine = engine_on(load_tiny(folder, dtype))
    expected = np.concatenate([text_vectors(model, folder, TEXTS), sound_vectors(model, reference_sounds())])

    async def compute() -> list[EmbedReply]:
        mixed = EmbedParts((*((text,) for text in TEXTS), *parts()))
        works = [mixed, Embed(tuple(TEXTS)), *(EmbedParts((part,)) for part in parts()[::6])]
        return list(await asyncio.gather(*(run_work(engine, work, EmbedReply) for work in works)))

    mixed, texts, *alone = asyncio.run(compute())

    assert cosines(mixed.vectors, expected).min() >= LEAST_COSINE[dtype]
    assert cosines(texts.vectors, expected[: len(TEXTS)]).min() >= LEAST_COSINE[dtype]
    singles = np.concatenate([reply.vectors for reply in alone])
    assert cosines(singles, expected[len(TEXTS) :: 6]).min() >= LEAST_COSINE[dtype]
    assert cosines(expected[:1], expected[1:]).min() < 0.9
    assert mixed.truncated == ()


def test_capabilities_name_the_operation(clap: tuple[DualModel, Path], engine: Engine) -> None:
    found = load_tiny(clap[1]).capabilities

    assert Operation.EMBED_AUDIO in found.operations
    assert Operation.EMBED_IMAGE not in found.operations
    assert (found.dimensions, found.max_input_tokens) == (24, 64)
    assert run(engine, EmbedParts(parts()[:1])).input_tokens == (16,)


@pytest.mark.parametrize("side", [Truncate.RIGHT, Truncate.LEFT])
def test_a_long_recording_is_cut_at_one_end_and_reported(side: Truncate, engine: Engine) -> None:
    samples = tone(2.5, RATE, seed=3)
    kept = samples[:RATE] if side is Truncate.RIGHT else samples[-RATE:]
    work = EmbedParts(
        tuple((Audio(recorded(found, RATE), "audio/wav"),) for found in (samples, kept)), truncate=side
    )

    reply = run(engine, work)

    np.testing.assert_allclose(reply.vectors[0], reply.vectors[1], atol=1e-6)
    assert reply.truncated == (0,)


NOT_A_NUMBER = np.full(100, np.nan, dtype=np.float32)
DAMAGED = {
    "nothing": (b"", "no whole recording"),
    "no recording": (b"hello" * 50, "no whole recording"),
    "header only": (recorded(np.zeros(0, dtype=np.float32), 8_000), "is empty"),
    "broken FLAC": (recorded(tone(0.5, 8_000), 8_000, "FLAC")[:60], "no whole recording|is empty"),
    "another format": (recorded(tone(0.1, 8_000), 8_000, "AIFF"), "recording in AIFF"),
    "slow": (recorded(tone(0.1, 8_000), 500), "500 samples a second"),
    "no numbers": (recorded(NOT_A_NUMBER, 8_000, "WAV", "FLOAT"), "not finite"),
    "too long": (recorded(tone(1.2, 8_000), 8_000), "reads 1 seconds, and the recording has 1.20"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_recording_is_an_error_of_its_input(kind: str, engine: Engine) -> None:
    data, message = DAMAGED[kind]
    inputs = (parts()[0], (Audio(data, "audio/wav"),))

    with pytest.raises(InvalidWork, match=message) as failure:
        run(engine, EmbedParts(inputs, truncate=Truncate.ERROR))

    assert failure.value.input_index == 1
    assert run(engine, EmbedParts(parts()[:1])).vectors.shape == (1, 24)


def test_a_checkpoint_without_its_feature_extractor_is_refused(
    clap: tuple[DualModel, Path], minilm: Path, tmp_path: Path
) -> None:
    make_dual("clap", minilm, tmp_path / "clap")
    (tmp_path / "clap" / "preprocessor_config.json").unlink()

    with pytest.raises(ModelUnavailable, match=r"no preprocessor_config\.json"):
        load(tmp_path / "clap", "tiny", LoadOptions("float32", "cpu"))


def test_a_picture_is_refused_by_a_model_of_sound(engine: Engine) -> None:
    from backends.contract import Image

    with pytest.raises(UnsupportedWork, match="does not embed_image"):
        run(engine, EmbedParts(((Image(b"", "image/png", 1, 1),),)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (recorded(tone(0.5, 8_000) * 1e38, 8_000, coding="FLOAT"), "full volume is 1"),
        (recorded(tone(0.5, 48_000), 48_000, "FLAC")[:-9000], "recording"),
        (b"RIFF" + b"\xff" * 40, "no whole recording of these formats: [A-Z, 0-9]*: [A-Z]"),
    ],
    ids=["too loud", "cut", "no recording"],
)
def test_a_recording_that_cannot_be_whole_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidWork, match=reason) as caught:
        open_recording(data, 48_000, 10, Truncate.RIGHT)
    assert "object at" not in str(caught.value)


def test_a_flac_that_states_more_than_it_has_is_refused() -> None:
    whole = recorded(tone(0.5, 48_000), 48_000, "FLAC")
    # The number of samples: 36 bits that end before the checksum of the first block.
    longer = whole[:22] + (10_000_000).to_bytes(4, "big") + whole[26:]

    assert 24_000 == len(open_recording(whole, 48_000, 300, Truncate.RIGHT).samples)
    with pytest.raises(InvalidWork, match=r"states 10,000,000 samples|no whole recording"):
        open_recording(longer, 48_000, 300, Truncate.RIGHT)
