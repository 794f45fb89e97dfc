"""Recordings, recognized by their content. Only headers are read; nothing is decoded.

Sources: RIFF WAVE (IBM and Microsoft, 1991), RFC 9639 (FLAC), RFC 3533 (Ogg), RFC 7845 (Opus), the
specification of Vorbis I, ISO 11172-3 and 13818-3 (MP3), and Xing's header of MP3 files.
"""

from typing import NamedTuple

from backends.contract import Audio

FORMATS = "WAV, FLAC, OGG, MP3"
# Longer ones are cut or refused by every model; servers decode the whole.
SECONDS_MAX = 3_600
# Of all channels, as float32: 1 GiB.
SAMPLES_MAX = 2**28
# Samples per second of telephones, and of the fastest converters.
RATES = (1_000, 384_000)
# Beginnings of other content at their places, and how its sender gets on.
OTHERS = (
    (4, b"ftyp", "an MP4 or M4A"),
    (0, b"FORM", "an AIFF"),
    (0, b"RF64", "an RF64"),
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska"),
    (0, b"#!AMR", "an AMR"),
    (0, b"MThd", "a MIDI"),
    (0, b"\xff\xf1", "an AAC"),
    (0, b"\xff\xf9", "an AAC"),
)
# The length of a file that was written while it was recorded.
STREAMED = (0, 0xFFFFFFFF)
# Chunks before the samples; a file has a few.
WAV_CHUNKS_MAX = 1_000
OPUS_RATE = 48_000
# Kilobits a second of layer III by index: of MPEG 1, and of MPEG 2 and 2.5.
BITRATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
MPEG_RATES = (44_100, 48_000, 32_000)
# By the two bits of the version: MPEG 2.5, none, 2, 1.
RATE_DIVISORS = (4, 0, 2, 1)
MPEG_1 = 3
# What stands before the first frame of an MP3, apart from its tag.
JUNK_BYTES_MAX = 4096


class Header(NamedTuple):
    """Facts in the header of a recording. channels: at least 1. seconds: its length."""

    media_type: str
    rate: int
    channels: int
    seconds: float


def read_recording(data: bytes) -> Audio:
    """Return a recording with its length. Raises: ValueError with the reason."""
    for place, beginning, name in OTHERS:
        if data[place : place + len(beginning)] == beginning:
            raise ValueError(f"it is {name}: send it as one of these: {FORMATS}")
    try:
        header = _header_of(data)
    except (IndexError, ZeroDivisionError) as error:
        raise _damaged() from error
    if not header.channels:
        raise ValueError("it has 0 channels; send it with one or two")
    if not RATES[0] <= header.rate <= RATES[1]:
        raise ValueError(f"it has {header.rate} samples a second; send it with {RATES[0]:,} to {RATES[1]:,}")
    _check_length(header)
    return Audio(data, header.media_type, header.seconds)


def _check_length(header: Header) -> None:
    """Check how long it takes to be decoded. Raises: ValueError."""
    if header.seconds <= 0:
        raise ValueError("it is empty; send one with sound")
    if header.seconds > SECONDS_MAX:
        raise ValueError(
            f"it is {header.seconds:,.0f} seconds long, more than {SECONDS_MAX:,}; cut it into parts"
        )
    if header.seconds * header.rate * header.channels > SAMPLES_MAX:
        raise ValueError(
            f"it has more than {SAMPLES_MAX:,} samples; send it with fewer channels, or in parts"
        )


def _header_of(data: bytes) -> Header:
    """Return what the header states. Raises: ValueError, IndexError, ZeroDivisionError."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav(data)
    if data[:4] == b"fLaC":
        return _flac(data[4:], "audio/flac")
    if data[:4] == b"OggS":
        return _ogg(data)
    return _mp3(data)


def _damaged() -> ValueError:
    return ValueError(f"it is none of these formats, or damaged: {FORMATS}")


def _little(data: bytes, start: int, size: int) -> int:
    """Return a number, lowest byte first. Raises: IndexError if it is not there."""
    if len(data) < start + size:
        raise IndexError
    return int.from_bytes(data[start : start + size], "little")


def _big(data: bytes, start: int, size: int) -> int:
    """Return a number, highest byte first. Raises: IndexError if it is not there."""
    if len(data) < start + size:
        raise IndexError
    return int.from_bytes(data[start : start + size], "big")


def _wav(data: bytes) -> Header:
    """Read the chunks up to the samples."""
    place, form = 12, b""
    for _ in range(WAV_CHUNKS_MAX):
        if place + 8 > len(data):
            raise _damaged()
        name, size = data[place : place + 4], _little(data, place + 4, 4)
        place += 8
        if name == b"fmt ":
            form = data[place : place + size]
        elif name == b"data":
            rest = len(data) - place
            length = rest if size in STREAMED else size
            if length > rest:
                raise ValueError(
                    f"it states {length:,} bytes of samples and has {rest:,}; send the whole of it"
                )
            return Header("audio/wav", _little(form, 4, 4), _little(form, 2, 2), length / _little(form, 8, 4))
        # Chunks begin at even places.
        place += size + size % 2
    raise ValueError(f"it has more than {WAV_CHUNKS_MAX:,} chunks before its samples; encode it again")


def _flac(blocks: bytes, media_type: str) -> Header:
    """Read STREAMINFO, the first metadata block."""
    if _big(blocks, 0, 1) & 0x7F:
        raise _damaged()
    facts = _big(blocks, 4 + 10, 8)
    rate, channels, samples = facts >> 44, (facts >> 41 & 7) + 1, facts & (1 << 36) - 1
    if not samples:
        raise ValueError("its header does not state its length; encode it again")
    return Header(media_type, rate, channels, samples / rate)


def _ogg(data: bytes) -> Header:
    """Read the first packet, which names the codec, and the last page, which states the samples."""
    packet = data[27 + data[26] :]
    last = _little(data, data.rindex(b"OggS") + 6, 8)
    if packet[:7] == b"\x01vorbis":
        rate, channels = _little(packet, 12, 4), packet[11]
        return Header("audio/ogg", rate, channels, last / rate)
    if packet[:8] == b"OpusHead":
        samples = last - _little(packet, 10, 2)
        return Header("audio/ogg", OPUS_RATE, packet[9], samples / OPUS_RATE)
    if packet[:5] == b"\x7fFLAC":
        return _flac(packet[13:], "audio/ogg")
    raise ValueError("it is an OGG with none of these codecs: Vorbis, Opus, FLAC")


def _mp3(data: bytes) -> Header:
    """Read the first frame, whose bitrate, or whose table of Xing, states the length."""
    start = _first_frame(data)
    frame = _big(data, start, 4)
    version = frame >> 19 & 3
    bitrate = BITRATES[version != MPEG_1][frame >> 12 & 15] * 1000
    rate = MPEG_RATES[frame >> 10 & 3] // RATE_DIVISORS[version]
    channels = 1 if frame >> 6 & 3 == 3 else 2
    frames = _frames_of_xing(data[start : start + 64], is_first=version == MPEG_1, channels=channels)
    samples = 1152 if version == MPEG_1 else 576
    seconds = frames * samples / rate if frames else (len(data) - start) * 8 / bitrate
    return Header("audio/mpeg", rate, channels, seconds)


def _first_frame(data: bytes) -> int:
    """Return the place of the first frame of layer III behind a tag. Raises: ValueError."""
    start = 0
    if data[:3] == b"ID3":
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        start = 10 + size
    for place in range(start, min(start + JUNK_BYTES_MAX, len(data) - 3)):
        if data[place] == 0xFF and _is_frame(head := _big(data, place, 4)):
            end = place + _frame_bytes(head)
            following = data[end : end + 4]
            if len(following) < 4 or _is_frame(_big(following, 0, 4)):
                return place
    raise _damaged()


def _frame_bytes(head: int) -> int:
    """Return the length of a frame."""
    version, padding = head >> 19 & 3, head >> 9 & 1
    bitrate = BITRATES[version != MPEG_1][head >> 12 & 15] * 1000
    rate = MPEG_RATES[head >> 10 & 3] // RATE_DIVISORS[version]
    return (144 if version == MPEG_1 else 72) * bitrate // rate + padding


def _is_frame(head: int) -> bool:
    """Return whether four bytes begin a frame of layer III with a known rate and bitrate."""
    is_synced, version, layer = head >> 21 == 0x7FF, head >> 19 & 3, head >> 17 & 3
    bitrate, rate = head >> 12 & 15, head >> 10 & 3
    return is_synced and version != 1 and layer == 1 and 0 < bitrate < 15 and rate < 3


def _frames_of_xing(frame: bytes, *, is_first: bool, channels: int) -> int | None:
    """Return the frames that the table of a variable bitrate states, None without one."""
    place = 4 + ((17 if channels == 1 else 32) if is_first else (9 if channels == 1 else 17))
    if frame[place : place + 4] not in (b"Xing", b"Info") or not frame[place + 7] & 1:
        return None
    return _big(frame, place + 8, 4)
