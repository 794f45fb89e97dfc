"""Facts about TEI that are known without its adapter."""

from backends.contract import Ask, LiteLLMProvider, ServerKind

# Beginnings of the addresses of servers that are called over gRPC, without and with TLS.
GRPC_SCHEMES = ("grpc://", "grpcs://")


def _recognize(ask: Ask) -> tuple[str, ...] | None:
    info = ask("/info")
    is_tei = isinstance(info, dict) and "model_id" in info and "max_client_batch_size" in info
    return (str(info["model_id"]),) if is_tei else None


# A server has one model, whose name it does not need.
TEI = ServerKind(
    "tei",
    "backends.tei.replica",
    recognize=_recognize,
    litellm={"huggingface": LiteLLMProvider(suffix="/v1")},
    is_multiple=False,
)
