"""Recordings as callers send them: read by their headers, and refused with the reason."""

import base64
import io
import struct
from contextlib import suppress

import pytest
import soundfile

from backends.http.media import probe_recording
from gateway.errors import InvalidInput
from gateway.media.recordings import SECONDS_MAX, read_recording
from gateway.media.sources import SoundSource, read_parts
from tests.engine.sounds import recorded, recordings, tone

TYPES = {"WAV": "audio/wav", "FLAC": "audio/flac", "OGG": "audio/ogg", "MP3": "audio/mpeg"}
WAV, FLAC, OGG = (
    recorded(tone(0.5, 8_000), 8_000, kind, *coding)
    for kind, *coding in (("WAV",), ("FLAC",), ("OGG", "VORBIS"))
)


def wav_header(rate: int = 8_000, channels: int = 1, byte_rate: int = 16_000, size: int = 0) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, byte_rate, 2, 16)
    return b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size)


@pytest.mark.parametrize("name", sorted(recordings()))
def test_a_recording_is_known_by_its_content(name: str) -> None:
    data = recordings()[name]
    audio, expected = read_recording(data), soundfile.info(io.BytesIO(data))

    assert (TYPES[expected.format], data) == (audio.media_type, audio.data)
    # An MP3 without a table of its frames is longer by the silence that its encoder adds.
    assert audio.seconds == pytest.approx(expected.duration, abs=0.1 if expected.format == "MP3" else 1e-3)


def test_an_mp3_behind_a_tag_has_the_length_of_its_frames() -> None:
    data = recorded(tone(4, 44_100, 2), 44_100, "MP3", "MPEG_LAYER_III")
    tag = b"ID3\4\0\0\0\0\1\0" + bytes(128)

    assert read_recording(tag + data).seconds == pytest.approx(4, abs=0.1)


def test_a_wav_that_was_streamed_ends_with_its_bytes() -> None:
    assert read_recording(wav_header(size=0xFFFFFFFF) + bytes(8_000)).seconds == 0.5


def test_a_wav_with_other_chunks_is_read() -> None:
    start, rest = WAV[:12], WAV[12:]
    assert read_recording(start + b"LIST\3\0\0\0abc\0" + rest).seconds == read_recording(WAV).seconds


def test_the_silence_that_asks_a_server_is_a_recording() -> None:
    probe = probe_recording()
    assert read_recording(probe.data) == probe
    assert soundfile.info(io.BytesIO(probe.data)).frames == 1_600


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of these formats"),
        (b"hello" * 50, "none of these formats"),
        (b"\0\0\0\x20ftypM4A ", "an MP4 or M4A"),
        (b"FORM\0\0\0\0AIFF", "an AIFF"),
        (b"\x1aE\xdf\xa3", "a WebM"),
        (b"\xff\xf1" + bytes(60), "an AAC"),
        (b"\xff\xfb\x90\x00" + bytes(2_000), "none of these formats"),
        (WAV[:20], "none of these formats"),
        (FLAC[:20], "none of these formats"),
        (OGG[:30], "none of these codecs"),
        (OGG[:26], "none of these formats"),
        (wav_header(), "is empty"),
        (WAV[: len(WAV) // 2], "states .* bytes of samples"),
        (WAV[:12] + b"junk\0\0\0\0" * 2_000 + WAV[12:], "more than 1,000 chunks"),
        (wav_header(byte_rate=0, size=4) + bytes(4), "none of these formats"),
        (wav_header(rate=10, size=4) + bytes(4), "10 samples a second"),
        (wav_header(channels=0, size=4) + bytes(4), "0 channels"),
        (wav_header(byte_rate=1, size=4_000) + bytes(4_000), f"more than {SECONDS_MAX:,}"),
        (wav_header(384_000, 64_000, 1_000, 4_000) + bytes(4_000), "samples; send it"),
        (FLAC[:21] + bytes([FLAC[21] & 0xF0]) + bytes(4) + FLAC[26:], "does not state its length"),
        (FLAC[:21] + bytes([FLAC[21] | 0x0F]) + b"\xff" * 4 + FLAC[26:], "seconds long"),
        (OGG[:28] + b"\x01speex " + OGG[35:], "none of these codecs"),
    ],
    # The serial number of an OGG is random, and names of tests are not.
    ids=lambda value: value if isinstance(value, str) else "data",
)
async def test_other_content_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        await read_parts([["a"], [SoundSource(data)]], "input")
    assert "the recording of `input` 1" in caught.value.message


@pytest.mark.parametrize("data", [WAV, FLAC, OGG, recordings()["MP3"]], ids=["WAV", "FLAC", "OGG", "MP3"])
def test_a_damaged_recording_is_read_or_refused(data: bytes) -> None:
    for place in range(min(len(data), 300)):
        changed = data[:place] + b"\xff" + data[place + 1 :]
        for damaged in (data[:place], changed, data[:place] + data[place + 3 :]):
            with suppress(ValueError):
                assert read_recording(damaged).seconds > 0


async def test_texts_and_recordings_stay_in_order() -> None:
    uri = f"data:audio/any;base64,{base64.b64encode(FLAC).decode()}"
    (first, second, third) = await read_parts([[SoundSource(WAV)], ["a"], [SoundSource(uri)]], "input")

    assert ("audio/wav", "a", "audio/flac") == (first[0].media_type, second[0], third[0].media_type)  # type: ignore[union-attr]
