"""Ends of the certificates that a gateway uses: its own for callers, and those that it shows to upstreams."""

import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from gateway.config.schema import Config, Section

BEGIN = "-----BEGIN CERTIFICATE-----"
END = "-----END CERTIFICATE-----"
# Tags of DER.
SEQUENCE, CONTEXT_0, UTC_TIME, GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class Certificates:
    """Ends of certificates as they were loaded; a renewed file is used once its owner is opened again."""

    def __init__(self) -> None:
        # By the place in the configuration: the settings with which its owner was opened, and the end.
        self._ends: dict[str, tuple[Section, float]] = {}

    def ends(self, config: Config) -> Mapping[str, float]:
        """Return the end of each certificate, in seconds since 1970, by its place in the configuration."""
        before, self._ends = self._ends, {}
        for place, file, owner in _files(config):
            known = before.get(place)
            if known is not None and known[0] == owner:
                self._ends[place] = known
            elif (end_s := end_of(Path(file))) is not None:
                self._ends[place] = owner, end_s
        return {place: end_s for place, (_, end_s) in self._ends.items()}


def _files(config: Config) -> Iterator[tuple[str, str, Section]]:
    """Yield the place, the file and the owner's settings of each certificate."""
    if config.tls is not None:
        yield "tls", config.tls.certificate, config.tls
    for name, upstream in config.upstreams.items():
        if upstream.tls.certificate is not None:
            yield f"upstreams.{name}.tls", upstream.tls.certificate, upstream


def end_of(file: Path) -> float | None:
    """Return when the first of a file's certificates ends, in seconds since 1970; None if it has none."""
    try:
        text = file.read_text("ascii", "replace")
        blocks = [block.partition(END)[0] for block in text.split(BEGIN)[1:]]
        return min(
            (_end_of_der(ssl.PEM_cert_to_DER_cert(BEGIN + block + END)) for block in blocks), default=None
        )
    except (OSError, ValueError, IndexError):
        # The listener or the upstream reports a file that it cannot load.
        return None


def _end_of_der(certificate: bytes) -> float:
    """Return the end of a certificate of X.509 (RFC 5280, 4.1). Raises: ValueError, IndexError."""
    _, body, _ = _element(certificate, 0)
    _, signed, _ = _element(body, 0)
    at = 0
    fields: list[bytes] = []
    # Version (optional), serial number, algorithm, issuer, validity.
    while len(fields) < 4:
        tag, content, at = _element(signed, at)
        if tag != CONTEXT_0:
            fields.append(content)
    _, _, second = _element(fields[3], 0)
    tag, moment, _ = _element(fields[3], second)
    if tag not in (UTC_TIME, GENERALIZED_TIME):
        raise ValueError("no time")
    text = moment.decode("ascii")
    if tag == UTC_TIME:
        # Years from 50 on are those of the last century.
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the tag and the content of the element at a position of DER, and the position behind it."""
    tag, size, at = data[at], data[at + 1], at + 2
    if size & 0x80:
        length = size & 0x7F
        size, at = int.from_bytes(data[at : at + length], "big"), at + length
    if at + size > len(data):
        raise ValueError("cut off")
    return tag, data[at : at + size], at + size
