"""Identity of scores: everything that may change one is part of it."""

import msgspec
import pytest

from backends.contract import Capabilities, Operation
from gateway.config.schema import UpstreamSettings
from gateway.vector_spaces.identity import IdentitySource

SETTINGS = UpstreamSettings(backend="torch", model="org/reranker", revision="a" * 40)
CAPABILITIES = Capabilities("org/reranker", frozenset({Operation.RERANK}), max_input_tokens=512)


def digest_of(
    settings: UpstreamSettings = SETTINGS, capabilities: Capabilities = CAPABILITIES, upstream: str = "u"
) -> bytes:
    identity = IdentitySource(upstream, settings).scores_of(capabilities)
    assert identity.dimensions == 2
    return identity.digest


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "b" * 40},
        {"model": "org/other"},
        {"dtype": "float16"},
        {"device": "cuda"},
        {"adapter": "lora"},
        {"rerank_template": "qwen3"},
    ],
)
def test_a_setting_that_may_change_a_score_changes_the_identity(change: dict[str, str]) -> None:
    assert digest_of() != digest_of(msgspec.structs.replace(SETTINGS, **change))


def test_capabilities_and_upstream_are_part_of_the_identity() -> None:
    shorter = msgspec.structs.replace(CAPABILITIES, max_input_tokens=256)

    assert 3 == len({digest_of(), digest_of(capabilities=shorter), digest_of(upstream="v")})


def test_what_changes_no_score_is_not_part_of_the_identity() -> None:
    settings = msgspec.structs.replace(SETTINGS, queue_tokens=5, request_inputs=7)
    elsewhere = msgspec.structs.replace(CAPABILITIES, checkpoint="/elsewhere", notes=("x",))

    assert digest_of() == digest_of(settings, elsewhere)


def test_the_identity_follows_the_capabilities() -> None:
    source = IdentitySource("u", SETTINGS)
    other = msgspec.structs.replace(CAPABILITIES, version="2")
    first, second = source.scores_of(CAPABILITIES), source.scores_of(other)

    assert first != second
    assert first == source.scores_of(CAPABILITIES)


def test_another_release_finds_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of()
    monkeypatch.setattr("gateway.vector_spaces.identity.__version__", "0.0.0-other")

    assert before != digest_of()
