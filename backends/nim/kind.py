"""Facts about NVIDIA NIM that are known without its adapter."""

from backends.contract import REMOTE_KEYS, Ask, KindSettings, ServerKind, listed_models

# Hosts of NVIDIA's own NIMs, which are paid by use.
EMBED_ADDRESS = "https://integrate.api.nvidia.com"
RERANK_ADDRESS = "https://ai.api.nvidia.com"


class NimSettings(KindSettings, frozen=True):
    """Settings of a NIM. hosted: it is one of NVIDIA's own, at the address of its operation."""

    hosted: bool = False

    def address(self) -> str | None:
        """Return the address of NVIDIA's embeddings, None for a NIM on own machines."""
        return EMBED_ADDRESS if self.hosted else None

    def is_hosted(self) -> bool:
        """Return True for one of NVIDIA's own."""
        return self.hosted


def _recognize(ask: Ask) -> tuple[str, ...] | None:
    metadata, listed = ask("/v1/metadata"), listed_models(ask("/v1/models"))
    return listed if listed and isinstance(metadata, dict) and "modelInfo" in metadata else None


NIM = ServerKind(
    "nim",
    "backends.nim.adapter",
    settings=NimSettings,
    recognize=_recognize,
    keys=REMOTE_KEYS | {"nim", "proxy", "extra_body", "task"},
    address_hint="a list of base URLs, http://host:port, or `nim: {hosted: true}` for NVIDIA's own",
)
