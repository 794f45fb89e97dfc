"""The engine as a backend: the contract's structs over its Unix socket. Imports no torch."""

import msgspec

from backends import errors
from backends.contract import Capabilities, ReplicaSpec, Reply, Residence, Work
from backends.http import ConnectionOptions, UpstreamClient
from backends.torch import wire
from backends.torch.stats import Stats
from backends.torch.stats import decoder as stats_decoder
from backends.tracing import record_phases

REFUSALS: dict[str, type[errors.BackendError]] = {
    one.kind: one
    for one in (
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
    """One model of an engine's process, whose Unix socket outlives its restarts."""

    def __init__(self, address: str) -> None:
        socket_path, base_url = wire.socket_and_base(address)
        self._http = UpstreamClient(base_url, options=ConnectionOptions(socket_path=socket_path))

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: ReplicaUnavailable while the engine is loading or restarting."""
        answer = await self._http.get("/info", timeout_s)
        if answer.status != 200:
            raise errors.ReplicaUnavailable("the engine is not ready")
        try:
            return wire.capabilities_decoder.decode(answer.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ReplicaFailed("the engine's description could not be read") from error

    async def residence(self, timeout_s: float) -> Residence:
        """Whether the model is in memory. Raises: BackendError."""
        answer = await self._http.get("/residence", timeout_s)
        try:
            return wire.residence_decoder.decode(answer.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ReplicaFailed("the engine's answer could not be read") from error

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError, as the engine told it."""
        body = wire.encoder.encode(wire.Request(work, timeout_s))
        answer = await self._http.post("/run", body, timeout_s, wire.MEDIA_TYPE)
        try:
            if answer.status == 200:
                record_phases(answer.headers)
                return wire.reply_decoder.decode(answer.body)
            refusal = wire.refusal_decoder.decode(answer.body)
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ReplicaFailed("the engine's answer could not be read") from error
        raise REFUSALS.get(refusal.kind, errors.ReplicaFailed)(refusal.message)

    async def stats(self, timeout_s: float) -> Stats | None:
        """What the engine has counted since it started; None while it does not answer."""
        try:
            answer = await self._http.get("/stats", timeout_s)
            return stats_decoder.decode(answer.body) if answer.status == 200 else None
        except (errors.BackendError, msgspec.DecodeError):
            return None

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> TorchBackend:
    """The model of the engine that the spec's address names."""
    return TorchBackend(spec.address)
