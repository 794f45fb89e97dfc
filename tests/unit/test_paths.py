"""The table of routes: what a request path means."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.dialects.manager.dialect import NOWHERE, move_path
from gateway.api.server.paths import CONSOLE_PATHS, SLASH, model_name
from gateway.app import ROUTES
from gateway.config.schema import OPERATION_SEGMENTS
from tests.route_labels import PLAIN_PATHS, ROUTE_LABELS

many = settings(max_examples=200, deadline=None)

SEGMENTS = st.text(st.characters(codec="utf-8", exclude_characters=f"/{SLASH}"), min_size=1, max_size=10)
# A name that ends like the version of an operation reads as a shorter name with that version.
NAMES = (
    st.lists(SEGMENTS, min_size=1, max_size=4)
    .filter(lambda segments: len(segments) == 1 or segments[-1] not in {"v1", "v2"})
    .map("/".join)
)
OPERATIONS = st.sampled_from(sorted(OPERATION_SEGMENTS))


def routed(path: str) -> str:
    """Return the path that Litestar's router gets."""
    return ROUTES.parse(path).path


def test_the_routes_and_labels_are_the_promised_ones() -> None:
    assert PLAIN_PATHS == ROUTES.plain_paths
    assert ROUTE_LABELS == ROUTES.labels


def test_the_configuration_knows_every_operation_below_models() -> None:
    """The configuration refuses such names by a list of its own, which must be complete."""
    below = {
        label
        for label in ROUTES.labels
        if label.startswith("/models/{model}/") and "/.well-known/" not in label
    }
    assert {path.rpartition("/")[2] for path in below} - {""} == OPERATION_SEGMENTS


@pytest.mark.parametrize("name", ["live", "org/ready", "org/name"])
def test_the_last_word_of_a_well_known_path_may_be_a_models_name(name: str) -> None:
    assert name == ROUTES.parse(f"/models/{name}").model
    target = ROUTES.parse(f"/models/{name}/.well-known/live")
    assert ("/models/{model}/.well-known/live", name) == (target.label, target.model)


@many
@given(NAMES, OPERATIONS)
def test_a_name_with_slashes_becomes_one_segment_and_back(name: str, operation: str) -> None:
    parts = routed(f"/models/{name}/{operation}").split("/")

    assert ["", "models", operation] == [*parts[:2], *parts[3:]]
    assert name == model_name(parts[2])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/bge/embed", "/models/bge/embed"),
        ("/models/org/bge/embed", f"/models/org{SLASH}bge/embed"),
        ("/models/a/b/c/rerank", f"/models/a{SLASH}b{SLASH}c/rerank"),
        ("/models/embed/info", "/models/embed/info"),
        ("/models/bge", "/models/bge"),
        ("/models/org/bge", f"/models/org{SLASH}bge"),
        ("/models/org/bge/", f"/models/org{SLASH}bge"),
        ("/models/org/bge/fly", f"/models/org{SLASH}bge{SLASH}fly"),
        ("/models/org/embed/info", f"/models/org{SLASH}embed/info"),
        ("/models/org/bge/v1/embeddings", f"/models/org{SLASH}bge/v1/embeddings"),
        ("/models/org/bge/v2/rerank", f"/models/org{SLASH}bge/v2/rerank"),
        ("/models/v1/rerank", "/models/v1/rerank"),
        ("/models/org/v1/tokenize", f"/models/org{SLASH}v1/tokenize"),
        ("/v1/encode/bge", "/v1/encode/bge"),
        ("/v1/encode/org/bge/", f"/v1/encode/org{SLASH}bge"),
        ("/v1/score/org/bge", f"/v1/score/org{SLASH}bge"),
        ("/openai/deployments/org/bge/embeddings", f"/openai/deployments/org{SLASH}bge/embeddings"),
        ("/openai/deployments//bge/embeddings/", "/openai/deployments/bge/embeddings"),
        ("/v1beta/models/org/bge:embedContent", f"/v1beta/models/org{SLASH}bge/:embedContent"),
        ("/v1beta/org/bge:embedContent", f"/v1beta/org{SLASH}bge/:embedContent"),
        ("/v1beta/models/a:b:batchEmbedContents", "/v1beta/models/a:b/:batchEmbedContents"),
        ("/v1beta/models/org/bge", f"/v1beta/models/org{SLASH}bge"),
    ],
)
def test_the_operation_is_the_last_segment_and_the_name_all_before_it(path: str, expected: str) -> None:
    assert expected == routed(path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/embed",
        "/v1/models/org/bge",
        "/v1/embeddings",
        "/models",
        "/models/",
        "/models/embed",
        "/models//embed",
        "/modelsorg/bge/embed",
    ],
)
def test_a_path_without_a_model_stays_unchanged(path: str) -> None:
    assert path == routed(path)


@pytest.mark.parametrize("path", ["/models/embed", "/models//embed", "/models/embed/"])
def test_an_operation_without_a_model_is_read_as_a_model_name(path: str) -> None:
    """The configuration refuses such a name, so that the caller gets a 404 and not the default model."""
    assert "embed" == ROUTES.parse(path).model


@many
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_parsing_a_routed_path_changes_nothing(rest: str) -> None:
    for path in (
        f"/{rest}",
        f"/models/{rest}",
        f"/models/{rest}/embed",
        f"/v1/encode/{rest}",
        f"/v1beta/models/{rest}:embedContent",
    ):
        assert routed(path) == routed(routed(path))


def test_a_missing_segment_is_no_name() -> None:
    assert model_name(None) is None


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/embeddings", "openai"),
        ("/v1/models", "openai"),
        ("/v1/models/org/bge", "openai"),
        ("/v1/nothing", "openai"),
        ("/embeddings", "openai"),
        ("/embed", "tei"),
        ("/rerank", "tei"),
        ("/info", "tei"),
        ("/", "tei"),
        ("/models/bge/embed", "tei"),
        ("/nothing", "tei"),
        ("/models/bge/nothing", "tei"),
        ("/models/org/bge/embeddings", "openai"),
        ("/models/org/bge/v1/embeddings", "openai"),
        ("/v1/rerank", "rerank"),
        ("/models/bge/v1/rerank", "rerank"),
        ("/v2/rerank", "cohere"),
        ("/v1/embed", "cohere"),
        ("/v2/embed", "cohere"),
        ("/v2/nothing", "cohere"),
        ("/models/org/bge/v2/embed", "cohere"),
        ("/score", "vllm"),
        ("/v1/score", "vllm"),
        ("/models/bge/v1/score", "vllm"),
        ("/models/bge/classify", "vllm"),
        ("/pooling", "vllm"),
        ("/detokenize", "vllm"),
        ("/tokenize", "tei"),
        ("/infinity/rerank", "infinity"),
        ("/api/embed", "ollama"),
        ("/openai/deployments/org/bge/embeddings", "openai"),
        ("/openai/nothing", "openai"),
        ("/v1/models/org/bge:embedContent", "gemini"),
        ("/v1beta/models/org/bge:embedContent", "gemini"),
        ("/v1beta/models/bge:generateContent", "gemini"),
        ("/api/generate", "ollama"),
        ("/infinity/nothing", "infinity"),
        ("/v1/encode/org/bge", "sie"),
        ("/v1/score/bge", "sie"),
        ("/score/", "vllm"),
        ("//v2//embed", "cohere"),
        ("/models/org/bge//classify/", "vllm"),
    ],
)
def test_a_path_has_the_errors_of_its_dialect(path: str, dialect: str) -> None:
    assert dialect == ROUTES.parse(path).dialect.name


@many
@given(NAMES.filter(lambda name: name.strip("/") == name))
def test_a_path_of_sie_ends_in_the_model_name(name: str) -> None:
    for prefix in ("/v1/encode/", "/v1/score/"):
        assert (prefix, name) == (
            routed(prefix + name)[: len(prefix)],
            model_name(routed(prefix + name)[len(prefix) :]),
        )


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/models/bge/v1/embeddings", "/models/{model}/v1/embeddings"),
        ("/models/org/bge/v2/rerank", "/models/{model}/v2/rerank"),
        ("/v1/encode/org/bge", "/v1/encode/{model}"),
        ("/v1/score/bge", "/v1/score/{model}"),
        ("/openai/deployments/org/bge/embeddings", "/openai/deployments/{model}/embeddings"),
        ("/v1beta/models/org/bge:embedContent", "/v1beta/models/{model}:embedContent"),
        ("/v1beta/org/bge:embedContent", "/v1beta/{model}:embedContent"),
        ("/v1beta/models/org/bge", "/v1beta/models/{name}"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/livez", "/livez"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/bge", "/v1/models/{model}"),
        ("/v1/models/org/bge", "/v1/models/{model}"),
        ("/models/bge/embed", "/models/{model}/embed"),
        ("/models/org/bge/rerank", "/models/{model}/rerank"),
        ("/nothing", "other"),
        ("/v1/nothing", "other"),
        ("/embed/", "other"),
    ],
)
def test_a_path_is_labelled_by_its_template(path: str, template: str) -> None:
    assert template == ROUTES.parse(path).label


@many
@given(
    st.text(st.characters(codec="utf-8"), max_size=30)
    | st.sampled_from(sorted({label.rpartition("/")[2] for label in ROUTE_LABELS}))
)
def test_labels_are_a_closed_list(rest: str) -> None:
    starts = (
        "/",
        "/models/",
        "/models/bge/",
        "/models/bge/v1/",
        "/v1/models/",
        "/v1/encode/",
        "/v1/score/",
        "/v1beta/models/",
        "/openai/deployments/",
        "/endpoints/bge/",
        "/hf-inference/models/bge/pipeline/",
    )
    for path in (start + rest for start in starts):
        assert ROUTES.parse(path).label in ROUTE_LABELS


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/instances/a/start", "/admin/instances/a/start"),
        ("/models", "/admin/registry"),
        ("/health", "/admin/manager/health"),
        ("/embed", NOWHERE),
    ],
)
def test_paths_of_the_manager_are_moved_below_admin(path: str, expected: str) -> None:
    scope = {"path": path, "raw_path": path.encode()}
    move_path(scope)

    assert (expected, expected.encode()) == (scope["path"], scope["raw_path"])


def test_the_paths_of_the_console_are_on_both_listeners_as_they_are_written() -> None:
    on_both = {path for path in (*CONSOLE_PATHS, "/livez", "/embed") if is_on_both(path)}
    assert {*CONSOLE_PATHS, "/livez"} == on_both
    assert not any(map(is_on_both, ("/usage/", "/livez/", "/docs/other", "/models/a/embed")))


def is_on_both(path: str) -> bool:
    return ROUTES.parse(path).options.on_both_listeners
