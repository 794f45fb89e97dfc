"""Reading of parsed YAML by the schema: misspelt keys are corrected, values with a problem are left out."""

from typing import Any

import msgspec
import pytest

from gateway.config.problems import Problem
from gateway.config.reader import Reader
from gateway.config.schema import Config

TEI = {"backend": "tei", "replicas": ["http://tei"]}
NAMED = {"backend": "tei", "policy": "round_robin"}


@pytest.mark.parametrize(
    ("written", "sound", "renamed"),
    [
        ({"upstream": {"a": TEI}}, {"upstreams": {"a": TEI}}, {"upstreams": "upstream"}),
        (
            {"upstreams": {"a": {"backend": "tei", "policyy": "round_robin"}}},
            {"upstreams": {"a": NAMED}},
            {"upstreams.a.policy": "policyy"},
        ),
        (
            {"upstreams": {"a": {"backend": "tei", "batch_inputs": 1}}},
            {"upstreams": {"a": {"backend": "tei", "request_inputs": 1}}},
            {"upstreams.a.request_inputs": "batch_inputs"},
        ),
        # The correct key is given too, or comes later.
        ({"upstream": 1, "upstreams": {}}, {"upstreams": {}}, {}),
        ({"modelz": {}, "modelx": 2}, {"models": {}}, {"models": "modelz"}),
        # Too different, without a space, and a name that the operator chose.
        ({"colour": 1}, {}, {}),
        ({"listen:x": None}, {}, {}),
        ({"models": {"upstreamz": {}}}, {"models": {"upstreamz": {}}}, {}),
        ({"upstreams": [{"policyy": 1}]}, {}, {}),
    ],
)
def test_a_misspelt_key_is_read_as_the_one_it_means(
    written: Any, sound: Any, renamed: dict[str, str]
) -> None:
    reader = Reader()

    assert sound == reader.read(written, Config)
    assert renamed == reader.renamed
    assert len(renamed) == len(reader.corrected)


@pytest.mark.parametrize(
    ("value", "reported", "sound"),
    [
        ({"listen": "", "workers": 2}, {"listen"}, {"workers": 2}),
        ({"listen": 1, "workers": 2}, set(), {"workers": 2}),
        ({"tls": {"certificate": "", "private_key": "b"}}, {"tls.certificate"}, {}),
        ({"tls": {"certificate": "a"}}, set(), {}),
        ({"upstreams": {"a": {"backend": "x"}, "b": TEI}}, set(), {"upstreams": {"b": TEI}}),
        ({"upstreams": {"a": {**TEI, "policy": 1}}}, set(), {"upstreams": {"a": TEI}}),
        ({"upstreams": {"a": TEI}}, {"upstreams.a.replicas[0]"}, {"upstreams": {"a": {"backend": "tei"}}}),
        ({"tenants": {"a": {"limits": {"x": 0, "y": 1}}}}, set(), {"tenants": {"a": {"limits": {"y": 1}}}}),
    ],
)
def test_values_with_a_problem_are_left_out_with_what_needs_them(
    value: Any, reported: set[str], sound: Any
) -> None:
    reader = Reader([Problem(path, "") for path in reported])

    assert sound == reader.read(value, Config)
    assert not reported.intersection(problem.path for problem in reader.problems)


def test_nothing_is_left_of_a_value_with_a_problem() -> None:
    assert msgspec.UNSET is Reader([Problem("tls", "")]).read({}, Config, "tls")
