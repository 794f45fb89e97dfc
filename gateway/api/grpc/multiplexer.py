"""TEI Manager's multiplexer: TEI's RPCs with a target in each message. Batches are in `arrow_batches.py`.

Source: nazq/tei-manager 0.12.0, proto/multiplexer.proto and src/grpc/server.rs.
"""

from collections.abc import Mapping
from dataclasses import replace

from backends.tei_protos import tei_multiplexer_pb2 as mux
from gateway.api.grpc import tei
from gateway.api.grpc.tei import Operation

SERVICE = mux.DESCRIPTOR.services_by_name["TeiMultiplexer"].full_name
INFO = f"/{SERVICE}/Info"
RERANK_STREAM = f"/{SERVICE}/RerankStream"
EMBED_ARROW = f"/{SERVICE}/EmbedArrow"
EMBED_SPARSE_ARROW = f"/{SERVICE}/EmbedSparseArrow"
# How TEI Manager names the request that a message lacks.
NAMES = {"EmbedSparse": "embed sparse", "EmbedAll": "embed all", "PredictPair": "predict pair"}


def _enveloped(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    """Return the same operations with a target in each message, by their paths here."""
    found = {}
    for path, operation in operations.items():
        method = path.rpartition("/")[2]
        name = method.removesuffix("Stream")
        found[f"/{SERVICE}/{method}"] = replace(operation, enveloped=NAMES.get(name, name.lower()))
    return found


UNARY = _enveloped(tei.UNARY)
STREAMS = _enveloped(tei.STREAMS)
