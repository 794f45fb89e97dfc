"""Recordings in many formats, encoded in memory."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import soundfile

RATES = (8_000, 11_025, 16_000, 22_050, 32_000, 44_100, 48_000)
# Format of soundfile and its encoding of samples.
FORMATS = (
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "FLOAT"),
    ("WAV", "PCM_U8"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
)


def tone(seconds: float, rate: int, channels: int = 1, seed: int = 0) -> Any:
    """Return a mixture of tones and noise: (samples, channels) float32."""
    time = np.arange(int(seconds * rate)) / rate
    generator = np.random.default_rng(seed)
    pitches = generator.uniform(100, 3000, (3, channels))
    waves = np.sin(2 * np.pi * time[:, None, None] * pitches).mean(axis=1)
    noise = generator.normal(0, 0.05 + 0.1 * (seed % 3), (len(time), channels))
    return (0.6 * waves + noise).clip(-1, 1).astype(np.float32)


def recorded(samples: Any, rate: int, kind: str = "WAV", coding: str = "PCM_16") -> bytes:
    """Return a recording in a format of soundfile."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=coding)
    return buffer.getvalue()


def recordings() -> dict[str, bytes]:
    """Return more than fifty encoded recordings of less than a second by name."""
    return dict(_recordings())


def _recordings() -> Iterator[tuple[str, bytes]]:
    for seed, rate in enumerate(RATES):
        for kind, coding in FORMATS:
            channels = 1 + (seed + len(coding)) % 2
            name = f"{kind} {coding} of {rate} Hz with {channels} channels"
            yield name, recorded(tone(0.2 + 0.09 * seed, rate, channels, seed), rate, kind, coding)
    for seed, channels in enumerate((1, 2, 3, 6), 20):
        yield f"FLAC with {channels} channels", recorded(tone(0.5, 16_000, channels, seed), 16_000, "FLAC")
    yield "MP3", recorded(tone(0.6, 44_100, 2, 30), 44_100, "MP3", "MPEG_LAYER_III")
    yield "MP3 of 16 kHz", recorded(tone(0.6, 16_000, 1, 31), 16_000, "MP3", "MPEG_LAYER_III")
    yield "OPUS", recorded(tone(0.6, 48_000, 1, 32), 48_000, "OGG", "OPUS")
    yield "one sample", recorded(tone(1, 8_000, 1, 33)[:1], 8_000)
    yield "silence", recorded(np.zeros(4_000, dtype=np.float32), 8_000)
    yield "a whole second", recorded(tone(1, 48_000, 2, 34), 48_000)
