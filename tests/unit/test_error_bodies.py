"""Status and envelope of every kind of error in every dialect."""

import json
from typing import Any

import pytest

from gateway.api.dialects.cohere.errors import RERANK
from gateway.api.server.error_bodies import TEI, document_errors, render_error
from gateway.app import ROUTES
from gateway.errors import FACTS, GatewayError, InvalidInput

BY_NAME = {dialect.name: dialect for dialect in ROUTES.dialects}


def render(kind: str, dialect: str, param: str | None = None) -> tuple[int, Any]:
    """Return status and body of an error of one kind, whose message is "why"."""
    error_type = type("Any", (GatewayError,), {"kind": kind})
    reply = render_error(error_type("why", param=param), BY_NAME[dialect])
    assert "application/json" == reply.media_type
    return reply.status, json.loads(reply.body)


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize("dialect", BY_NAME)
def test_every_kind_has_the_status_of_its_dialect(kind: str, dialect: str) -> None:
    facts = FACTS[kind]
    manager = 422 if facts.tei_status == 422 else facts.status
    own = {"tei": facts.tei_status, "infinity": facts.infinity_status, "manager": manager}

    assert own.get(dialect, facts.status) == render(kind, dialect)[0]


@pytest.mark.parametrize("kind", FACTS)
def test_every_kind_has_the_shape_of_its_dialect(kind: str) -> None:
    facts = FACTS[kind]
    _, openai = render(kind, "openai", "input")
    status, vllm = render(kind, "vllm", "input")
    _, sie = render(kind, "sie")

    assert ("why", facts.openai_type, "input", facts.openai_code) == tuple(
        openai["error"][key] for key in ("message", "type", "param", "code")
    )
    assert "why" == openai["detail"]
    assert {"error": "why", "error_type": facts.tei_type} == render(kind, "tei")[1]
    assert {"message": "why"} == render(kind, "cohere")[1]
    assert {"message": "why", "detail": "why"} == render(kind, "rerank")[1]
    assert ("why", "input", status) == tuple(vllm["error"][key] for key in ("message", "param", "code"))
    assert vllm["error"]["type"].endswith("Error")
    assert {"message": "why", "code": sie["detail"]["code"]} == sie["detail"]
    assert sie["detail"]["code"].isupper()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("invalid_input", {"detail": [{"type": "value_error", "loc": ["body", "input"], "msg": "why"}]}),
        ("malformed_body", {"detail": [{"type": "value_error", "loc": ["body", "input"], "msg": "why"}]}),
        ("unauthenticated", {"detail": "why"}),
        ("not_found", {"detail": "why"}),
        ("method_not_allowed", {"detail": "why"}),
        ("overloaded", {"error": {"message": "why", "type": None, "param": None, "code": 429}}),
        ("internal", {"error": {"message": "why", "type": None, "param": None, "code": 500}}),
    ],
)
def test_infinity_uses_fastapis_envelope_where_its_server_does(kind: str, body: Any) -> None:
    assert body == render(kind, "infinity", "input")[1]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("BadRequestError", "invalid_input"),
        ("NotFoundError", "model_not_found"),
        ("InternalServerError", "internal"),
    ],
)
def test_vllm_names_the_type_after_the_status(status: str, kind: str) -> None:
    assert status == render(kind, "vllm")[1]["error"]["type"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_INPUT", "invalid_input"),
        ("INVALID_INPUT", "empty_input"),
        ("MODEL_NOT_FOUND", "model_not_found"),
        ("MODEL_LOADING", "model_loading"),
        ("MODEL_NOT_LOADED", "no_replica"),
        ("INFERENCE_ERROR", "upstream_failed"),
    ],
)
def test_sie_has_its_own_codes(code: str, kind: str) -> None:
    assert code == render(kind, "sie")[1]["detail"]["code"]


@pytest.mark.parametrize("dialect", BY_NAME)
def test_every_error_status_of_a_dialect_is_documented(dialect: str) -> None:
    kinds = FACTS.keys() - {"not_found", "method_not_allowed"}

    assert {render(kind, dialect)[0] for kind in kinds} == document_errors(BY_NAME[dialect]).keys()


def test_two_dialects_of_one_path_document_both_envelopes() -> None:
    statuses = document_errors(TEI, RERANK)

    assert {400, 422, 424, 502} <= statuses.keys()
    assert render_error(InvalidInput("why"), TEI).status in statuses
