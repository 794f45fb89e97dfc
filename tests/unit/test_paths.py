"""Which model, operation, dialect and label a path means."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.paths import KNOWN, SLASH, dialect_of, model_name, settled, template_of
from gateway.config import OPERATION_SEGMENTS

many = settings(max_examples=200, deadline=None)

SEGMENTS = st.text(st.characters(codec="utf-8", exclude_characters=f"/{SLASH}"), min_size=1, max_size=10)
NAMES = st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join)
OPERATIONS = st.sampled_from(sorted(OPERATION_SEGMENTS))


@many
@given(NAMES, OPERATIONS)
def test_a_name_with_slashes_becomes_one_segment_and_is_read_back_whole(name: str, operation: str) -> None:
    parts = settled(f"/models/{name}/{operation}").split("/")

    assert ["", "models", operation] == [*parts[:2], *parts[3:]]
    assert name == model_name(parts[2])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/bge/embed", "/models/bge/embed"),
        ("/models/org/bge/embed", f"/models/org{SLASH}bge/embed"),
        ("/models/a/b/c/rerank", f"/models/a{SLASH}b{SLASH}c/rerank"),
        ("/models/embed/info", "/models/embed/info"),
        ("/models/org/embed/info", f"/models/org{SLASH}embed/info"),
    ],
)
def test_the_operation_is_the_last_segment_and_the_name_all_before_it(path: str, expected: str) -> None:
    assert expected == settled(path)


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
        "/models/org/bge",
        "/models/org/bge/",
        "/models/org/bge/fly",
        "/modelsorg/bge/embed",
    ],
)
def test_a_path_that_names_no_model_and_operation_stays_as_it_is(path: str) -> None:
    assert path == settled(path)


@many
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_settling_twice_changes_nothing_more(rest: str) -> None:
    for path in (f"/{rest}", f"/models/{rest}", f"/models/{rest}/embed"):
        assert settled(path) == settled(settled(path))


def test_no_segment_is_no_name() -> None:
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
    ],
)
def test_a_path_speaks_the_errors_of_its_dialect(path: str, dialect: str) -> None:
    assert dialect == dialect_of(path)


@pytest.mark.parametrize(
    ("path", "template"),
    [
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
    assert template == template_of(path)


@many
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_no_typing_mistake_makes_a_label_of_its_own(rest: str) -> None:
    labels = {*KNOWN, "other", "/v1/models/{model}"}
    labels |= {f"/models/{{model}}/{operation}" for operation in OPERATION_SEGMENTS}
    for path in (f"/{rest}", f"/models/{rest}", f"/models/bge/{rest}", f"/v1/models/{rest}"):
        assert template_of(path) in labels
