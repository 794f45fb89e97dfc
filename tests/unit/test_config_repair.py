"""Repair of a configuration: misspelt keys are corrected, and values with a problem are taken out."""

from typing import Any

import msgspec
import pytest

from gateway.config.repair import KeyCorrector, sound_parts
from gateway.config.schema import Config

TEI = {"backend": "tei", "replicas": ["http://tei"]}


@pytest.mark.parametrize(
    ("written", "corrected", "renamed"),
    [
        ({"upstream": {"a": TEI}}, {"upstreams": {"a": TEI}}, {"upstreams": "upstream"}),
        (
            {"upstreams": {"a": {"policyy": 1}}},
            {"upstreams": {"a": {"policy": 1}}},
            {"upstreams.a.policy": "policyy"},
        ),
        (
            {"upstreams": {"a": {"batch_inputs": 1}}},
            {"upstreams": {"a": {"request_inputs": 1}}},
            {"upstreams.a.request_inputs": "batch_inputs"},
        ),
        # The correct key is given too, or comes later.
        ({"upstream": 1, "upstreams": {}}, {"upstream": 1, "upstreams": {}}, {}),
        ({"modelz": 1, "modelx": 2}, {"models": 1, "modelx": 2}, {"models": "modelz"}),
        # Too different, without a space, and a name that the operator chose.
        ({"colour": 1}, {"colour": 1}, {}),
        ({"listen:x": None}, {"listen:x": None}, {}),
        ({"models": {"upstreamz": {}}}, {"models": {"upstreamz": {}}}, {}),
        ({"upstreams": [{"policyy": 1}]}, {"upstreams": [{"policyy": 1}]}, {}),
    ],
)
def test_a_misspelt_key_is_read_as_the_one_it_means(
    written: Any, corrected: Any, renamed: dict[str, str]
) -> None:
    corrector = KeyCorrector()

    assert corrected == corrector.correct(written, Config)
    assert renamed == corrector.renamed
    assert len(renamed) == len(corrector.problems)


@pytest.mark.parametrize(
    ("value", "bad", "sound"),
    [
        ({"listen": 1, "workers": 2}, {"listen"}, {"workers": 2}),
        ({"tls": {"certificate": 1, "private_key": "b"}}, {"tls.certificate"}, {}),
        ({"tls": {"certificate": "a"}}, set(), {}),
        (
            {"upstreams": {"a": {"backend": "x"}, "b": TEI}},
            {"upstreams.a.backend"},
            {"upstreams": {"b": TEI}},
        ),
        (
            {"upstreams": {"a": {**TEI, "policy": 1}}},
            {"upstreams.a.policy"},
            {"upstreams": {"a": TEI}},
        ),
        ({"upstreams": {"a": TEI}}, {"upstreams.a.replicas[0]"}, {"upstreams": {"a": {"backend": "tei"}}}),
        (
            {"tenants": {"a": {"limits": {"x": 0, "y": 1}}}},
            {"tenants.a.limits.x"},
            {"tenants": {"a": {"limits": {"y": 1}}}},
        ),
    ],
)
def test_values_with_a_problem_are_taken_out_with_what_needs_them(
    value: Any, bad: set[str], sound: Any
) -> None:
    assert sound == sound_parts(value, Config, "", bad)


def test_nothing_is_left_of_a_value_with_a_problem() -> None:
    assert msgspec.UNSET is sound_parts({}, Config, "tls", {"tls"})
