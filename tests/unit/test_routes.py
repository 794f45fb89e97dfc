"""Resolution of model names to upstreams, with defaults and permissions."""

import pytest

from backends.contract import Operation, Truncate
from gateway.config import schema as config
from gateway.errors import InvalidInput, ModelForbidden, ModelNotFound, OperationUnsupported
from gateway.routing.routes import Route, Routes
from gateway.tenants.keyring import Tenant

EMBEDS = frozenset({Operation.EMBED, Operation.TOKENIZE})
RERANKS = frozenset({Operation.RERANK, Operation.TOKENIZE})
UNRESTRICTED = Tenant("anyone")
MODELS = {
    "bge": config.ModelSettings("embedder", truncate="left", deadline_s=7.5),
    "org/bge": config.ModelSettings("embedder"),
    "plain": config.ModelSettings("embedder", rerank=False),
    "cross": config.ModelSettings("reranker"),
    "new": config.ModelSettings("loading"),
}
OFFERED: dict[str, frozenset[Operation] | None] = {"embedder": EMBEDS, "reranker": RERANKS, "loading": None}


def offered(model: str) -> frozenset[Operation] | None:
    """Return the operations of a model's upstream."""
    return OFFERED[MODELS[model].upstream]


def routes(*names: str, embed: str | None = None, rerank: str | None = None) -> Routes:
    """Return routes of some models, or of all."""
    models = {name: MODELS[name] for name in names or MODELS}
    return Routes(models, config.Defaults(embed, rerank), offered)


def test_route_has_the_models_options() -> None:
    expected = Route("bge", "embedder", Operation.EMBED, Truncate.LEFT, 7.5)

    assert expected == routes().resolve(UNRESTRICTED, "bge", Operation.EMBED)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("org/bge", Operation.EMBED),
        ("bge", Operation.TOKENIZE),
        ("bge", Operation.RERANK),
        ("cross", Operation.RERANK),
        ("new", Operation.RERANK),
        ("new", Operation.EMBED),
    ],
)
def test_resolves_operations_that_are_offered_or_not_yet_known(name: str, operation: Operation) -> None:
    route = routes().resolve(UNRESTRICTED, name, operation)

    assert (name, operation) == (route.model, route.operation)


@pytest.mark.parametrize(("name", "operation"), [("plain", Operation.RERANK), ("cross", Operation.EMBED)])
def test_unsupported_operation_names_the_model(name: str, operation: Operation) -> None:
    with pytest.raises(OperationUnsupported, match=name) as caught:
        routes().resolve(UNRESTRICTED, name, operation)

    assert "model" == caught.value.param


@pytest.mark.parametrize("name", ["", "BGE", "bge/", "unknown"])
def test_unknown_model_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        routes(embed="bge").resolve(UNRESTRICTED, name, Operation.EMBED)
    with pytest.raises(ModelNotFound):
        routes().upstream_of(name)

    assert "model" == caught.value.param


@pytest.mark.parametrize(
    ("models", "name", "operation"),
    [
        ({"bge", "cross"}, "org/bge", Operation.EMBED),
        (set(), "bge", Operation.EMBED),
        # It takes precedence over an operation that is not supported.
        (set(), "cross", Operation.EMBED),
        # The default of the operation.
        ({"cross"}, None, Operation.EMBED),
    ],
)
def test_tenant_may_use_only_its_own_models(models: set[str], name: str | None, operation: Operation) -> None:
    tenant = Tenant("acme", models=frozenset(models))

    assert sorted(models) == routes().names(tenant)
    assert list(MODELS) == routes().names(UNRESTRICTED)
    with pytest.raises(ModelForbidden, match=name or "bge"):
        routes(embed="bge").resolve(tenant, name, operation)


@pytest.mark.parametrize(
    ("name", "models", "end"),
    [
        ("BGE", None, "; did you mean 'bge'?"),
        ("crosss", None, "; did you mean 'cross'?"),
        ("unlike", None, "; this key may use bge, cross"),
        ("x" * 65, None, "; this key may use bge, cross"),
        # Not a model of other tenants.
        ("BGE", frozenset({"cross"}), "; this key may use cross"),
        ("BGE", frozenset(), ""),
    ],
)
def test_unknown_model_suggests_a_similar_name(name: str, models: frozenset[str] | None, end: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        routes("bge", "cross").resolve(Tenant("acme", models=models), name, Operation.EMBED)

    assert f"there is no model {name!r} here{end}" == caught.value.message
    assert name[:64] == caught.value.reason


def test_unknown_model_names_some_of_many() -> None:
    names = [f"m{number}" for number in range(30)]
    with pytest.raises(ModelNotFound, match=r"may use m0, m1, m2, m3, m4 and 25 more: GET /v1/models$"):
        Routes(dict.fromkeys(names, MODELS["bge"]), config.Defaults(), offered).resolve(
            Tenant("acme"), "unlike", Operation.EMBED
        )


def test_only_model_serves_any_name_if_configured() -> None:
    any_name = config.Defaults(any_name=True)
    one = Routes({"bge": MODELS["bge"]}, any_name, offered)
    several = Routes(MODELS, any_name, offered)

    assert "bge" == one.resolve(UNRESTRICTED, "text-embeddings-inference", Operation.EMBED).model
    assert "embedder" == one.upstream_of("text-embeddings-inference")
    with pytest.raises(ModelForbidden):
        one.resolve(Tenant("acme", models=frozenset()), "tei", Operation.EMBED)
    with pytest.raises(ModelNotFound):
        several.resolve(UNRESTRICTED, "text-embeddings-inference", Operation.EMBED)


@pytest.mark.parametrize(
    ("of_file", "operation"),
    [
        ("bge", Operation.EMBED),
        ("bge", Operation.TOKENIZE),
        ("bge", Operation.RERANK),
        ("cross", Operation.RERANK),
        ("new", Operation.RERANK),
    ],
)
def test_an_added_model_does_not_take_requests_without_a_model_from_the_file(
    of_file: str, operation: Operation
) -> None:
    models = {name: MODELS[name] for name in (of_file, *MODELS)}
    added = MODELS.keys() - {of_file}
    with_added = Routes(models, config.Defaults(any_name=True), offered, added)

    assert [of_file, of_file] == [with_added.default_model(operation), with_added.root_model()]
    assert OFFERED.keys() >= {MODELS[of_file].upstream} == {with_added.upstream_of("unknown")}
    assert {*added} == {with_added.resolve(UNRESTRICTED, name, Operation.TOKENIZE).model for name in added}


def test_an_added_model_is_the_default_of_an_operation_that_no_model_of_the_file_does() -> None:
    models = {name: MODELS[name] for name in ("cross", "bge", "org/bge")}
    one = Routes({name: models[name] for name in ("cross", "bge")}, config.Defaults(), offered, ["bge"])
    two = Routes(models, config.Defaults(), offered, ["bge", "org/bge"])
    only = Routes({"bge": MODELS["bge"]}, config.Defaults(any_name=True), offered, ["bge"])

    assert "bge" == one.default_model(Operation.EMBED)
    assert "cross" == one.root_model()
    with pytest.raises(InvalidInput):
        two.default_model(Operation.EMBED)
    assert ["bge", "bge"] == [only.root_model(), only.default_model(Operation.EMBED)]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [(Operation.EMBED, "bge"), (Operation.TOKENIZE, "bge"), (Operation.RERANK, "cross")],
)
def test_request_without_model_uses_the_operations_default(operation: Operation, expected: str) -> None:
    route = routes(embed="bge", rerank="cross").resolve(UNRESTRICTED, None, operation)

    assert expected == route.model


@pytest.mark.parametrize(
    ("names", "operation", "expected"),
    [
        (["bge"], Operation.EMBED, "bge"),
        (["plain", "cross"], Operation.EMBED, "plain"),
        (["plain", "cross"], Operation.RERANK, "cross"),
        (["bge"], Operation.RERANK, "bge"),
        (["new"], Operation.RERANK, "new"),
    ],
)
def test_only_capable_model_is_the_default(names: list[str], operation: Operation, expected: str) -> None:
    assert expected == routes(*names).default_model(operation)


@pytest.mark.parametrize(
    ("names", "operation"),
    [
        (["bge", "org/bge"], Operation.EMBED),
        (["bge", "cross"], Operation.RERANK),
        (["bge", "new"], Operation.EMBED),
    ],
)
def test_several_capable_models_require_a_name(names: list[str], operation: Operation) -> None:
    with pytest.raises(InvalidInput) as caught:
        routes(*names).default_model(operation)

    assert "model" == caught.value.param
    assert f"`defaults.{operation}`" in caught.value.message


def test_no_capable_model_is_unsupported() -> None:
    with pytest.raises(OperationUnsupported, match="no model here does embed"):
        routes("cross").default_model(Operation.EMBED)


def test_configured_classifier_is_the_default() -> None:
    defaults = config.Defaults(embed="bge", rerank="cross", classify="new")
    all_routes = Routes(MODELS, defaults, offered)

    assert ["bge", "cross", "new", "bge"] == [
        all_routes.default_model(operation)
        for operation in (Operation.EMBED, Operation.RERANK, Operation.CLASSIFY, Operation.DETOKENIZE)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bge", {Operation.EMBED, Operation.RERANK, Operation.TOKENIZE}),
        ("plain", EMBEDS),
        ("cross", RERANKS),
        ("new", set(Operation)),
    ],
)
def test_model_lists_its_operations(name: str, expected: set[Operation]) -> None:
    assert expected == set(routes().operations(name))


def test_alias_has_the_upstream_of_its_model() -> None:
    assert "embedder" == routes().upstream_of("org/bge") == routes().upstream_of("bge")
