"""Problems of models that have several upstreams, a canary or a mirror."""

import pytest

from gateway.config.notes import ignored_keys
from gateway.config.problems import ConfigError
from gateway.config.schema import ModelSettings
from gateway.declared.additions import Additions, Remove
from tests.config_texts import parsed, problems_of

UPSTREAMS = """
upstreams:
  a: {backend: tei, replicas: ["http://a"]}
  b: {backend: tei, replicas: ["http://b"]}
  lazy: {backend: torch, model: org/model, preload: false}
"""


def text_of(model: str) -> str:
    return f"{UPSTREAMS}models: {{m: {model}}}\n"


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        ("{}", "models.m.upstream", "is missing"),
        ("{upstreams: []}", "models.m.upstream", "is missing"),
        ("{upstreams: [{name: a}, {name: x}]}", "models.m.upstreams[1].name", "there is no upstream 'x'"),
        ("{upstreams: [{name: a}, {name: a}]}", "models.m.upstreams[1].name", "is listed twice"),
        ("{upstreams: [{name: a, weight: 0}]}", "models.m.upstreams[0].weight", "at least 1"),
        ("{upstreams: [{name: a, priority: -1}]}", "models.m.upstreams[0].priority", "at least 0"),
        ("{upstream: a, upstreams: [{name: b}]}", "models.m.upstream", "`upstreams` has them all"),
        ("{upstream: a, canary: {name: a, share: 0.1}}", "models.m.canary.name", "serves the model already"),
        ("{upstream: a, mirror: {name: a, share: 0.1}}", "models.m.mirror.name", "serves the model already"),
        ("{upstream: a, canary: {name: x, share: 0.1}}", "models.m.canary.name", "there is no upstream 'x'"),
        ("{upstream: a, canary: {name: b, share: 2}}", "models.m.canary.share", "at most 1"),
        ("{upstream: a, canary: {name: b}}", "models.m.canary.share", "is missing"),
        ("{upstreams: [{name: a}, {name: lazy}]}", "models.m.upstreams[1].name", "remove `preload: false`"),
        ("{upstream: a, split_by: caller}", "models.m.split_by", "is not one of: tenant, request"),
    ],
)
def test_a_mistake_is_named(model: str, path: str, message: str) -> None:
    [problem] = problems_of(text_of(model))

    assert path == problem.path
    assert message in problem.message


def test_the_first_of_the_lowest_priority_is_the_main_upstream() -> None:
    model = parsed(text_of("{upstreams: [{name: a, priority: 2}, {name: b, priority: 1}]}")).models["m"]

    assert ("b", ("a", "b"), True) == (model.upstream, model.upstream_names, model.is_group)
    assert not parsed(text_of("{upstreams: [{name: a}]}")).models["m"].is_group
    assert not ModelSettings("a").is_group


def test_stickiness_of_one_upstream_has_no_effect() -> None:
    assert ["models.m.split_by"] == [
        problem.path for problem in ignored_keys(parsed(text_of("{upstream: a, split_by: tenant}")))
    ]


@pytest.mark.parametrize(
    "model",
    [
        {"upstreams": [{"name": "a"}, {"name": "new"}]},
        {"upstream": "a", "canary": {"name": "new", "share": 0.1}},
        {"upstream": "a", "mirror": {"name": "new", "share": 0.1}},
    ],
)
def test_an_added_upstream_that_a_model_refers_to_is_not_removed(model: dict[str, object]) -> None:
    additions = Additions(upstreams={"new": {}}, models={"n": model})
    with pytest.raises(ConfigError, match="it serves models, which go first: n"):
        Remove("upstreams", "new").apply(parsed(text_of("{upstream: a}")), additions)
