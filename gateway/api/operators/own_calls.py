"""GET /usage/calls: the recent calls of the tenant whose key is sent, and what to do about failed ones."""

from collections.abc import Mapping, Sequence

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from gateway.api.operators.fleet import FleetApi
from gateway.api.operators.pages import LIMIT_MAX, check_limit
from gateway.api.operators.status import StatusSource
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import RequestContext
from gateway.events import Stage
from gateway.fleet.fleet import chosen
from gateway.fleet.store import CallFilter
from gateway.telemetry.history import CALLS_MAX, RecentCall

FAILURES = document_errors(TEI)
# Calls of one page unless the query says otherwise.
LIMIT_DEFAULT = 100
# Pages of the console ask for it again and again.
USAGE = "/usage"

# Outcome of a call → what its caller does about it.
ADVICE: Mapping[str, str] = {
    "cancelled": "The connection was closed before the reply was sent: allow the client more time.",
    "invalid_input": "Correct the field that the message names, and send the request again.",
    "empty_input": "Send at least one input that is not empty.",
    "malformed_body": "Send a body of JSON in UTF-8, with content-type: application/json.",
    "request_exceeds_limit": "Send fewer or shorter inputs: this request alone is above one of your limits.",
    "body_too_large": "Split the request: its body is larger than the gateway accepts.",
    "unsupported_media": "Send the body without compression.",
    "unauthenticated": "Send a valid key in the header Authorization: Bearer <key>.",
    "auth_throttled": "Wait as long as retry-after says, then send a valid key.",
    "model_forbidden": "Use a model that GET /v1/models lists, or ask the operator for this one.",
    "scope_forbidden": "Use a key with the scope that the message names, or ask the operator for one.",
    "tenant_unknown": "Ask the operator: the tenant of this key is not defined.",
    "model_not_found": "Use a name that GET /v1/models lists.",
    "not_found": "Check the path of the request.",
    "method_not_allowed": "Check the method of the request: the path is served with another one.",
    "already_exists": "Choose another name or id: this one is taken.",
    "precondition_failed": "Read the object again, then repeat the change with its new etag.",
    "instance_not_found": "Check the name of the instance.",
    "instance_invalid": "Correct the setting that the message names.",
    "instance_running": "Stop the instance first, or leave it as it is.",
    "model_download_failed": "Ask the operator: the model could not be downloaded.",
    "model_load_failed": "Ask the operator: the model could not be loaded.",
    "instances_unavailable": "Try again later, or ask the operator.",
    "file_storage_full": "Delete files that you no longer need, or ask the operator for more room.",
    "batches_unavailable": "Try again as retry-after says: files and batches cannot be used now.",
    "operation_unsupported": "Use a model that supports this operation: GET /v1/models lists all models.",
    "quota_exceeded": "Wait as long as retry-after says, send less, or ask the operator for a higher limit.",
    "overloaded": "Try again as retry-after says, with fewer requests at a time.",
    "gateway_full": "Try again as retry-after says, with smaller or fewer requests at a time.",
    "no_replica": "Try again as retry-after says; if it goes on, report the request id to the operator.",
    "quota_unavailable": "Try again as retry-after says: limits cannot be checked now.",
    "sign_on_unavailable": "Try again as retry-after says: the issuer of your token cannot be reached now.",
    "shutting_down": "Try again at once: this gateway was stopping.",
    "model_loading": "Try again as retry-after says: the model is being loaded.",
    "upstream_failed": "Try again; if it goes on, report the request id to the operator.",
    "deadline_exceeded": "Send fewer or shorter inputs, or allow more time with the header x-timeout-s.",
    "internal": "Report the request id to the operator: this is a fault of the gateway.",
}

# Kinds whose messages name nothing that is for operators only, such as an address.
KINDS_WITH_MESSAGE = frozenset({"quota_exceeded", "overloaded", "model_forbidden", "model_not_found"})


class OwnCall(msgspec.Struct, frozen=True):
    """A call of the tenant whose key was sent.

    at_s: its end, in seconds since 1970. status: of HTTP. outcome: `ok`, `cancelled`, or the kind of the
    error. message: of the error, as its reply had it, null for most kinds. advice: what to do about it, null
    for `ok`. stages: seconds of each, as in `server-timing`. cost: in the gateway's currency, null
    if the call was not served, or its model has no price. truncated_inputs: number of inputs that were cut,
    null if it is not known. trace_id: null unless the call was traced.
    """

    request_id: str
    at_s: float
    model: str | None
    operation: str | None
    status: int
    outcome: str
    message: str | None
    advice: str | None
    duration_s: float
    stages: Mapping[Stage, float]
    inputs: int
    tokens: int
    cost: float | None
    truncated_inputs: int | None
    key_id: str | None
    trace_id: str | None


class OwnCalls(msgspec.Struct, frozen=True):
    """The last calls of a tenant, the newest first.

    kept: calls of all tenants that a gateway keeps. is_complete: false if a gateway did not answer in time.
    """

    kept: int
    calls: list[OwnCall]
    is_complete: bool = True


@get("/usage/calls", responses=FAILURES, tags=["Operators"], opt=route_options())
async def own_calls(
    context: NamedDependency[RequestContext],
    api: NamedDependency[InferenceApi],
    watched: NamedDependency[StatusSource],
    fleet_api: NamedDependency[FleetApi],
    limit: FromQuery[int | None] = None,
    *,
    failed: FromQuery[bool] = False,
    fleet: FromQuery[bool] = False,
) -> OwnCalls:
    """Return the last calls of the tenant whose key is sent, without any content.

    `failed` selects those that ended with an error. `limit` is at most 1,000, and 100 without it. `fleet`
    asks all gateways that share this gateway's Redis, for a few seconds at most.
    """
    tenant = api.authenticator.authenticate(context)
    tenant.require_key()
    most = check_limit(limit, LIMIT_DEFAULT, LIMIT_MAX)
    wanted = CallFilter(tenant.name, failed=failed)
    if fleet:
        of_all = await fleet_api.calls_for_tenant(tenant.name, wanted)
        is_complete = not (of_all.missing or of_all.problem)
        return OwnCalls(CALLS_MAX, _own_calls(of_all.calls, most), is_complete)
    return OwnCalls(CALLS_MAX, _own_calls(chosen(watched.history.calls.calls(tenant.name), wanted), most))


def _own_calls(calls: Sequence[RecentCall], most: int) -> list[OwnCall]:
    """Return the newest calls, without those that ask for the usage."""
    return [_own(call) for call in calls if call.route != USAGE][:most]


def _own(call: RecentCall) -> OwnCall:
    return OwnCall(
        call.request_id,
        call.at_s,
        call.model,
        call.operation,
        call.status,
        call.outcome,
        call.message if call.outcome in KINDS_WITH_MESSAGE else None,
        ADVICE.get(call.outcome),
        call.duration_s,
        call.stages,
        call.inputs,
        call.tokens,
        call.cost,
        call.truncated_inputs,
        call.key_id,
        call.trace_id,
    )


HANDLERS = [own_calls]
