"""Facts about vLLM that are known without its adapter."""

from backends.contract import Ask, LiteLLMProvider, ServerKind, listed_models


def _recognize(ask: Ask) -> tuple[str, ...] | None:
    listed, version = listed_models(ask("/v1/models")), ask("/version")
    return listed if listed and isinstance(version, dict) and "version" in version else None


VLLM = ServerKind(
    "vllm",
    "backends.vllm.adapter",
    recognize=_recognize,
    litellm=dict.fromkeys(("hosted_vllm", "vllm"), LiteLLMProvider(suffix="/v1")),
    cuts_inputs=True,
)
