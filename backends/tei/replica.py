"""Client of a TEI server, over HTTP or over gRPC by its address."""

from backends.contract import Backend, ReplicaSpec
from backends.http.client import open_client
from backends.tei.adapter import TeiBackend
from backends.tei.kind import GRPC_SCHEMES


def open_replica(spec: ReplicaSpec) -> Backend:
    """Return a client of the TEI server at the spec's address; it connects at its first request."""
    if spec.address.startswith(GRPC_SCHEMES):
        # Imported here, because it needs the packages of an extra.
        from backends.tei.grpc_adapter import open_replica as open_grpc

        return open_grpc(spec)
    return TeiBackend(open_client(spec))
