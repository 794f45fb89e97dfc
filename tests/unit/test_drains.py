"""Drains of replicas: edits, composition with the file, and what a file may say."""

from pathlib import Path

import pytest

from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.declared.additions import Additions, Drain, Put, Remove, UnknownAddition
from gateway.declared.composition import compose

ONE, TWO = "http://one", "http://two"
FILE = """
upstreams: {{pair: {{backend: tei, replicas: ["http://one", "http://two"]{more}}}}}
models: {{m: {{upstream: pair}}}}
tenants: {{acme: {{keys: ["sha256:{digest}"]}}}}
"""
ADDED = Put("upstreams", "added", {"backend": "tei", "replicas": [ONE, TWO]})


def file(more: str = "") -> Config:
    return parse_config(FILE.format(more=more, digest="0" * 64), {}, Path("/nowhere"))


def edited(*edits: Drain | Put | Remove) -> Additions:
    additions = Additions()
    for edit in edits:
        additions = edit.apply(file(), additions)
    return additions


def drain(replica: str, name: str = "pair") -> Drain:
    return Drain(name, replica, is_drained=True)


def undrain(replica: str, name: str = "pair") -> Drain:
    return Drain(name, replica, is_drained=False)


def test_drains_are_kept_until_they_are_undone() -> None:
    assert {"pair": (TWO, ONE)} == edited(drain(ONE), drain(TWO), drain(ONE)).drained
    assert {"pair": (TWO,)} == edited(drain(ONE), drain(TWO), undrain(ONE)).drained
    assert Additions() == edited(drain(ONE), undrain(ONE))


def test_a_removed_upstream_leaves_no_drain() -> None:
    additions = edited(ADDED, drain(ONE, "added"), drain(TWO), Remove("upstreams", "added"))

    assert {"pair": (TWO,)} == additions.drained


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drain(ONE, "nowhere"), "neither router.yaml nor an addition"),
        (undrain(ONE), "was not drained here"),
        (undrain(ONE, "nowhere"), "was not drained here"),
    ],
)
def test_refuses_edits_of_what_does_not_exist(edit: Drain, message: str) -> None:
    with pytest.raises(UnknownAddition) as raised:
        edited(edit)

    assert message in raised.value.problem.message


def test_drains_are_bounded_together() -> None:
    additions = Additions(drained={"pair": ("x" * 1024 * 1024,)})
    with pytest.raises(ConfigError, match="additions"):
        drain(ONE).apply(file(), additions)


def test_drains_add_to_those_of_the_file_and_of_additions() -> None:
    own = Put("upstreams", "added", {**ADDED.settings, "drained": [TWO]})
    additions = edited(own, drain(ONE, "added"), drain(ONE), drain(TWO))
    config = compose(file(', drained: ["http://two"]'), additions, {}, {}).config

    assert (TWO, ONE) == config.upstreams["pair"].drained
    assert (TWO, ONE) == config.upstreams["added"].drained


def test_drains_of_an_upstream_that_is_gone_change_nothing() -> None:
    additions = Additions(drained={"gone": (ONE,)})

    assert file() == compose(file(), additions, {}, {}).config


@pytest.mark.parametrize(
    ("upstream", "message"),
    [
        ('backend: tei, replicas: ["http://one"], drained: ["http://two"]', "is not one of `replicas`"),
        ('backend: tei, discover: dns, replicas: ["http://one"], drained: ["http://one"]', "of `discover`"),
        ("backend: torch, model: org/model, drained: [engine]", "torch runs here and is not drained"),
    ],
)
def test_a_file_names_replicas_that_can_be_drained(upstream: str, message: str) -> None:
    text = FILE.format(more="", digest="0" * 64).replace(
        'backend: tei, replicas: ["http://one", "http://two"]', upstream
    )
    with pytest.raises(ConfigError) as raised:
        parse_config(text, {}, Path("/nowhere"))

    assert any(message in problem.message and ".drained" in problem.path for problem in raised.value.problems)
