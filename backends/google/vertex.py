"""Adapter of Vertex AI, and of Google's ranking API."""

import re

import msgspec

from backends.contract import ReplicaSpec, Rerank
from backends.google.credentials import bearer_token
from backends.google.kind import VertexSettings
from backends.google.models import vertex_model
from backends.hosted.adapter import HostedBackend
from backends.http.egress import OpenClient, open_egress

RANKING_HOST = "discoveryengine.googleapis.com"
# With and without a location.
VERTEX_HOST = re.compile(r"//(?:[a-z0-9-]+-)?aiplatform\.(?:[a-z]+\.rep\.)?googleapis\.com(?:[:/]|$)")


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> HostedBackend:
    """Return a client of the model at the spec's base URL. Raises: ModelUnavailable, without google-auth."""
    settings = spec.settings if isinstance(spec.settings, VertexSettings) else VertexSettings()
    model = vertex_model(spec.model or "", settings.project, settings.location, settings.input_type)
    if Rerank in model.routes and VERTEX_HOST.search(spec.address):
        spec = msgspec.structs.replace(spec, address=f"https://{RANKING_HOST}")
    has_token = any(name.lower() == "authorization" for name in spec.headers)
    authorizer = None if has_token else bearer_token(spec, settings.credentials)
    return HostedBackend(open_client(spec, authorizer), model, spec.tokenizer)
