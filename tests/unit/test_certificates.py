"""Ends of certificates, read from files as other tools write them."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from gateway.config.certificates import Certificates, end_of
from tests.config_texts import parsed

AUTHORITY = trustme.CA()
CONFIG = """
tls: {{certificate: "{own}", private_key: key.pem}}
upstreams:
  one: {{backend: tei, replicas: ["https://a"], tls: {{certificate: "{shown}", private_key: key.pem}}{more}}}
  two: {{backend: tei, replicas: ["https://b"]}}
models: {{bge: {{upstream: one}}, other: {{upstream: two}}}}
"""


def write(file: Path, *ends: datetime) -> Path:
    """Write a file of certificates with these ends."""
    blobs = [AUTHORITY.issue_cert("a.example", not_after=end).cert_chain_pems[0] for end in ends]
    file.write_bytes(b"".join(blob.bytes() for blob in blobs))
    return file


# The first is written as UTCTime, the second as GeneralizedTime.
@pytest.mark.parametrize(
    "end", [datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC), datetime(2061, 5, 6, 7, 8, 9, tzinfo=UTC)]
)
def test_end_is_that_which_a_library_reads(tmp_path: Path, end: datetime) -> None:
    file = write(tmp_path / "leaf.pem", end)
    certificate = x509.load_pem_x509_certificate(file.read_bytes())

    assert end == certificate.not_valid_after_utc
    assert end.timestamp() == end_of(file)


def test_end_of_a_chain_is_the_first_end_in_it(tmp_path: Path) -> None:
    file = write(
        tmp_path / "chain.pem",
        datetime(2040, 1, 1, tzinfo=UTC),
        datetime(2030, 1, 1, tzinfo=UTC),
        datetime(2050, 1, 1, tzinfo=UTC),
    )

    assert datetime(2030, 1, 1, tzinfo=UTC).timestamp() == end_of(file)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
    ],
)
def test_file_without_a_readable_certificate_has_no_end(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.pem"
    file.write_text(content)

    assert end_of(file) is None
    assert end_of(tmp_path / "missing.pem") is None


def test_renewed_file_counts_once_its_owner_is_opened_again(tmp_path: Path) -> None:
    own = write(tmp_path / "own.pem", datetime(2030, 1, 1, tzinfo=UTC))
    shown = write(tmp_path / "shown.pem", datetime(2030, 2, 2, tzinfo=UTC))
    certificates = Certificates()

    def ends(more: str = "") -> list[tuple[str, int]]:
        config = parsed(CONFIG.format(own=own, shown=shown, more=more))
        found = certificates.ends(config)
        return [(place, datetime.fromtimestamp(end_s, UTC).year) for place, end_s in found.items()]

    assert [("tls", 2030), ("upstreams.one.tls", 2030)] == ends()
    write(own, datetime(2035, 1, 1, tzinfo=UTC))
    write(shown, datetime(2035, 1, 1, tzinfo=UTC))
    assert [("tls", 2030), ("upstreams.one.tls", 2030)] == ends()
    assert [("tls", 2030), ("upstreams.one.tls", 2035)] == ends(", api_key: new")
