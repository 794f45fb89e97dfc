"""Decoding of recordings with soundfile and soxr, as transformers' `load_audio` does.

Only this module imports the two. Rule: CPU-bound. Call it outside of the event loop.
"""

import io
import math
from typing import Any, NamedTuple

import numpy as np

from backends.contract import Truncate, Vectors
from backends.contract.errors import InvalidWork, ModelUnavailable

FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
NAMES = "WAV, FLAC, OGG, MP3"
# Samples per second of telephones, and of the fastest converters.
RATES = (1_000, 384_000)
# Of all channels: 256 MiB as float32.
SAMPLES_MAX = 2**26
# Its square is far from the largest float32. Full volume of 32 bits, sent as if they were floats, is 2**31.
AMPLITUDE_MAX = 1e10


class Recording(NamedTuple):
    """Samples of one channel, (n,) float32. is_cut: the recording was longer."""

    samples: Vectors
    is_cut: bool


def require_soundfile() -> None:
    """Raise ModelUnavailable if soundfile or soxr is not installed."""
    try:
        import soundfile  # noqa: F401 - part of an extra
        import soxr  # noqa: F401 - part of an extra
    except (ImportError, OSError) as error:
        raise ModelUnavailable(
            "models of sound need soundfile and soxr; install the extra `media`: "
            "pip install 'embedding-gateway[media]'"
        ) from error


def open_recording(data: bytes, rate: int, seconds: float, truncate: Truncate) -> Recording:
    """Return the mean of a recording's channels at a rate, and at most so many seconds of it.

    Raises: InvalidWork if it is no whole recording of `FORMATS`, or too long and not to be cut.
    """
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_form(file)
            kept = min(file.frames, int(seconds * file.samplerate))
            _check_length(file, kept, truncate)
            if truncate is Truncate.LEFT:
                file.seek(file.frames - kept)
            channels = file.read(kept, dtype="float32", always_2d=True)
            if 0 < len(channels) < kept and file.format != "MP3":
                raise InvalidWork(
                    f"the recording states {kept:,} samples and has {len(channels):,}; send the whole of it"
                )
            is_cut, own_rate = kept < file.frames, int(file.samplerate)
    except soundfile.LibsndfileError as error:
        # Its message begins with the address of the file object.
        reason = str(error.error_string).strip().removesuffix(".")
        raise InvalidWork(f"it is no whole recording of these formats: {NAMES}: {reason}") from error
    if not len(channels):
        raise InvalidWork("the recording is empty; send one with sound")
    samples = channels.mean(axis=1) if channels.shape[1] > 1 else channels[:, 0]
    # Also False for NaN.
    if not np.abs(samples).max() <= AMPLITUDE_MAX:
        raise InvalidWork(
            f"the recording has samples above {AMPLITUDE_MAX:,.0f}, or that are not finite numbers; "
            "full volume is 1"
        )
    return Recording(_resampled(samples, own_rate, rate)[: int(seconds * rate)], is_cut)


def _resampled(samples: Vectors, own_rate: int, rate: int) -> Vectors:
    import soxr

    if own_rate == rate:
        return np.ascontiguousarray(samples)
    count = math.ceil(len(samples) * rate / own_rate)
    resampled = soxr.resample(samples, own_rate, rate, quality="soxr_hq")
    padded: Vectors = np.pad(resampled, (0, max(0, count - len(resampled))))[:count]
    return np.ascontiguousarray(padded, dtype=np.float32)


def _check_form(file: Any) -> None:
    """Raise InvalidWork for a recording that the engine does not read."""
    if file.format not in FORMATS:
        raise InvalidWork(f"it is a recording in {file.format}, not in one of these formats: {NAMES}")
    if not RATES[0] <= file.samplerate <= RATES[1]:
        raise InvalidWork(
            f"the recording has {file.samplerate} samples a second; send it with {RATES[0]:,} to {RATES[1]:,}"
        )


def _check_length(file: Any, kept: int, truncate: Truncate) -> None:
    """Raise InvalidWork if the frames to read take too much memory, or must not be cut."""
    if kept < file.frames and truncate is Truncate.ERROR:
        raise InvalidWork(
            f"the model reads {kept / file.samplerate:g} seconds, and the recording has "
            f"{file.frames / file.samplerate:.2f}; cut it into parts"
        )
    if kept * file.channels > SAMPLES_MAX:
        raise InvalidWork(f"the recording has {file.channels} channels; send it with one or two")
