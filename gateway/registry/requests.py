"""Requests of operators about the models of this host, and their results, in TEI Manager's fields."""

from typing import Literal, TypeAlias

import msgspec

from gateway.registry.records import State


class ModelInfo(msgspec.Struct, frozen=True):
    """One model as operators see it.

    downloaded: it is in the cache. added_at: of the last change, RFC 3339 in UTC. The fields from
    `stored_bytes` on are this gateway's own. error: why the last download or load failed. done_bytes,
    total_bytes, bytes_per_s: of a download. upstreams: that serve it.
    """

    model_id: str
    status: State
    downloaded: bool
    added_at: str | None
    stored_bytes: int = 0
    error: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    dimensions: int | None = None
    load_secs: float | None = None
    upstreams: tuple[str, ...] = ()


class ListModels(msgspec.Struct, frozen=True, tag="list_models"):
    """Request for all models."""


class AddModel(msgspec.Struct, frozen=True, tag="add_model"):
    """Request to list a model of the Hub."""

    model_id: str


class ActOnModel(msgspec.Struct, frozen=True, tag="act_on_model"):
    """Request about one model."""

    model_id: str
    action: Literal["get", "download", "load"]


ModelCommand: TypeAlias = ListModels | AddModel | ActOnModel


class ModelProblem(msgspec.Struct, frozen=True):
    """Reason why a request has failed. kind: TEI Manager's code of the error."""

    kind: Literal[
        "VALIDATION_ERROR", "MODEL_NOT_FOUND", "MODEL_DOWNLOAD_FAILED", "MODEL_LOAD_FAILED", "UNAVAILABLE"
    ]
    message: str


class ModelResult(msgspec.Struct, frozen=True, tag="models"):
    """Result of a request. is_new: the request has added the model."""

    problem: ModelProblem | None = None
    models: tuple[ModelInfo, ...] = ()
    is_new: bool = False
