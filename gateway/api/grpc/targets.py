"""Targets of the multiplexer's messages: which model answers.

Source: nazq/tei-manager 0.12.0, which routes by the name of an instance only.
"""

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from backends.tei_protos import tei_multiplexer_pb2 as mux
from gateway.api.grpc.messages import OTHER_FIELDS_MAX, open_envelope
from gateway.api.grpc.rpc import Rpc
from gateway.api.server.inference_api import InferenceApi
from gateway.declared.host import InstanceInfo
from gateway.errors import InvalidInput, MalformedBody, ModelNotFound, NoReplica

SHOWN_CHARACTERS_MAX = 128


def take_request(rpc: Rpc, message: bytes, name: str) -> bytes:
    """Return the request in a message, encoded, and note its target. name: of the request.

    Raises: InvalidInput, MalformedBody, ModelNotFound, NoReplica.
    """
    envelope = open_envelope(message, OTHER_FIELDS_MAX)
    take_target(rpc, envelope.target)
    if envelope.request is None:
        raise InvalidInput(f"Missing {name} request", param="request")
    return envelope.request


def take_target(rpc: Rpc, encoded: bytes | None) -> None:
    """Make the target's model that of the RPC. All messages of a stream have the target of the first.

    encoded: None if it is absent, as it may be after the first.
    Raises: InvalidInput, MalformedBody, ModelNotFound, NoReplica.
    """
    if rpc.target is None and encoded is None:
        raise InvalidInput("Missing target", param="target")
    if encoded is None:
        return
    if rpc.target is not None:
        if encoded != rpc.target:
            raise InvalidInput(
                "`target` differs between messages of one stream; open a stream for each", param="target"
            )
        return
    try:
        target = mux.Target.FromString(encoded)
    except DecodeError as error:
        raise MalformedBody("`target` is no valid protobuf Target") from error
    tenant = rpc.context.tenant
    routes = rpc.parts.api.gateway.routes
    rpc.aim(encoded, model_of(target, routes.names(tenant) if tenant else (), rpc.parts.api))


def model_of(target: mux.Target, names: Sequence[str], api: InferenceApi) -> str:
    """Return the public name of a target's model.

    names: models that the key may use, in the configuration's order.
    Raises: InvalidInput, ModelNotFound, NoReplica.
    """
    kind = target.WhichOneof("routing")
    if kind == "instance_name":
        return _by_name(target.instance_name, names, api)
    if kind == "model_id":
        return _by_model(target.model_id, names, api)
    if kind == "instance_index":
        return _by_index(target.instance_index, names, api)
    raise InvalidInput("Missing target", param="target")


def _by_name(name: str, names: Sequence[str], api: InferenceApi) -> str:
    if not name:
        raise InvalidInput("Instance name cannot be empty", param="target")
    if (instance := api.instances.by_name(name)) is not None:
        return _of_instance(instance, f"Instance '{name}'", names, api)
    if name not in api.gateway.routes.all_names():
        raise ModelNotFound(f"Instance '{name[:SHOWN_CHARACTERS_MAX]}' not found", param="target")
    return name


def _by_model(model_id: str, names: Sequence[str], api: InferenceApi) -> str:
    """Return the model with a public name, or else the first one of the only upstream that reports an id."""
    if model_id in names:
        return model_id
    routes = api.gateway.routes
    found: dict[str, str] = {}
    for name in names:
        upstream = routes.upstream_of(name)
        facts = api.gateway.view_of(name).capabilities
        if facts is not None and facts.model_id == model_id:
            found.setdefault(upstream, name)
    if len(found) > 1:
        # Servers of one id need not compute the same vectors.
        listed = ", ".join(repr(name) for name in list(found.values())[:8])
        raise InvalidInput(f"several models are {model_id!r}: {listed}; name one of them", param="target")
    if not found:
        raise ModelNotFound(f"Model '{model_id[:SHOWN_CHARACTERS_MAX]}' not found", param="target")
    return next(iter(found.values()))


def _by_index(index: int, names: Sequence[str], api: InferenceApi) -> str:
    """Return the model of an instance by the order of creation; without instances, of the key's models."""
    if (instance := api.instances.by_index(index)) is not None:
        return _of_instance(instance, f"Instance {index}", names, api)
    count = len(api.instances) or len(names)
    if index >= count:
        raise ModelNotFound(f"Instance {index} not found; there are {count}", param="target")
    return names[index]


def _of_instance(instance: InstanceInfo, shown: str, names: Sequence[str], api: InferenceApi) -> str:
    """Return a model that the upstream of an instance serves, one that the key may use if there is any.

    shown: the instance as the caller named it. names: models that the key may use.
    Raises: NoReplica, if no calls are sent to the instance now.
    """
    routes = api.gateway.routes
    settings = api.gateway.serving.config.models
    models = [name for name in routes.all_names() if instance.upstream in settings[name].upstream_names]
    if not instance.joined or not models:
        raise NoReplica(f"{shown} is {instance.status}, not running")
    models = [name for name in models if name in names] or models
    return instance.upstream if instance.upstream in models else models[0]
