"""Adapter of the built-in engine: the contract's structs over its Unix socket. Imports no torch."""

import msgspec

from backends.contract import NUMBER_MAX, Capabilities, ReplicaSpec, Reply, Residence, Work, errors
from backends.http.client import ConnectionOptions, UpstreamClient
from backends.http.offers import check_numbers
from backends.torch import wire
from backends.torch.stats import EngineStats
from backends.torch.stats import decoder as stats_decoder
from backends.tracing import record_phases

REFUSALS: dict[str, type[errors.BackendError]] = {
    error.kind: error
    for error in (
        errors.InvalidWork,
        errors.UnsupportedWork,
        errors.ReplicaOverloaded,
        errors.ModelNotLoaded,
        errors.ModelUnavailable,
        errors.ReplicaUnavailable,
        errors.AttemptTimedOut,
        errors.ReplicaFailed,
    )
}


class TorchBackend:
    """One model of an engine process. The path of its Unix socket stays the same over restarts."""

    def __init__(self, address: str) -> None:
        socket_path, base_url = wire.socket_and_base(address)
        self._http = UpstreamClient(base_url, options=ConnectionOptions(socket_path=socket_path))

    async def describe(self, timeout_s: float) -> Capabilities:
        """Return the model's capabilities.

        Raises: ReplicaUnavailable while the engine is loading or restarting; ModelUnavailable if its files
        cannot be used; ReplicaFailed.
        """
        response = await self._http.get("/info", timeout_s)
        if response.status != 200:
            residence = await self.residence(timeout_s)
            if residence.state == "failed":
                raise errors.ModelUnavailable(residence.error or "its model cannot be loaded")
            raise errors.ReplicaUnavailable("the engine is not ready")
        try:
            found = wire.capabilities_decoder.decode(response.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ReplicaFailed("the engine's description could not be read") from error
        check_numbers(found)
        return found

    async def residence(self, timeout_s: float) -> Residence:
        """Return whether the model is in memory. Raises: BackendError."""
        response = await self._http.get("/residence", timeout_s)
        try:
            return wire.residence_decoder.decode(response.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ReplicaFailed("the engine's answer could not be read") from error

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Run one piece of work. Raises: BackendError, as the engine reports it."""
        body = wire.encoder.encode(wire.Request(work, timeout_s))
        response = await self._http.post("/run", body, timeout_s, wire.MEDIA_TYPE)
        try:
            if response.status == 200:
                record_phases(response.headers)
                return _checked(wire.reply_decoder.decode(response.body))
            refusal = wire.refusal_decoder.decode(response.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ReplicaFailed("the engine's answer could not be read") from error
        kind = REFUSALS.get(refusal.kind, errors.ReplicaFailed)
        raise kind(refusal.message, input_index=refusal.input_index)

    async def stats(self, timeout_s: float) -> EngineStats | None:
        """Return the statistics since the engine started, None while it does not respond."""
        try:
            response = await self._http.get("/stats", timeout_s)
            return stats_decoder.decode(response.body) if response.status == 200 else None
        except (errors.BackendError, msgspec.DecodeError):
            return None

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        await self._http.aclose()


def _checked(reply: Reply) -> Reply:
    if not 0 <= reply.tokens <= NUMBER_MAX:
        raise errors.ReplicaFailed(f"the engine counted {reply.tokens} tokens")
    return reply


def open_replica(spec: ReplicaSpec) -> TorchBackend:
    """Return the model of the engine that the spec's address names."""
    return TorchBackend(spec.address)
