"""Settings of servers of OpenAI's API and its relatives, and facts that are known without their adapter."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from backends.contract import REMOTE_KEYS, VENDOR_KEYS, Ask, LiteLLMProvider, ServerKind, listed_models

ADAPTER = "backends.openai.adapter"
# Any server of OpenAI's API, and hosted APIs that differ in details.
ApiKind: TypeAlias = Literal["openai", "cohere", "jina", "voyage"]
# Base URLs of the providers; servers of OpenAI's own API are run by many.
API_ADDRESSES: dict[ApiKind, str | None] = {
    "openai": None,
    "cohere": "https://api.cohere.com/v2",
    "jina": "https://api.jina.ai/v1",
    "voyage": "https://api.voyageai.com/v1",
}
API_KEYS = frozenset({"embeddings", "rerank", "input_type", "extra_body", "task"})
# Kind, LiteLLM's name of it, and the variable from which LiteLLM takes its key.
HOSTED: tuple[tuple[ApiKind, str, str], ...] = (
    ("cohere", "cohere", "COHERE_API_KEY"),
    ("jina", "jina_ai", "JINA_AI_API_KEY"),
    ("voyage", "voyage", "VOYAGE_API_KEY"),
)


class ApiSettings(msgspec.Struct, frozen=True):
    """Settings for servers of OpenAI's API and of its relatives; None leaves the choice to the kind.

    embeddings, rerank: paths, from the root of the server with a leading slash, else below the base URL.
    input_type: the server's word for each role, and for `default`. extra_body: fields of every request.
    task: the only operation that the model is asked for.
    """

    kind: ApiKind = "openai"
    embeddings: str | None = None
    rerank: str | None = None
    input_type: Mapping[str, str] | None = None
    extra_body: Mapping[str, Any] = {}
    task: Literal["embed", "rerank"] | None = None


def _recognize(ask: Ask) -> tuple[str, ...] | None:
    return listed_models(ask("/v1/models")) or None


OPENAI = ServerKind(
    "openai",
    ADAPTER,
    recognize=_recognize,
    litellm={
        "openai": LiteLLMProvider("https://api.openai.com/v1", "OPENAI_API_KEY"),
        "text-completion-openai": LiteLLMProvider("https://api.openai.com/v1", "OPENAI_API_KEY"),
        "mistral": LiteLLMProvider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
        "together_ai": LiteLLMProvider("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
        "nvidia_nim": LiteLLMProvider("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
        "fireworks_ai": LiteLLMProvider("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
        "deepinfra": LiteLLMProvider("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
        "ollama": LiteLLMProvider("http://localhost:11434"),
        **dict.fromkeys(
            ("lm_studio", "litellm_proxy", "openai_like", "llamafile", "xinference"), LiteLLMProvider()
        ),
    },
    keys=REMOTE_KEYS | VENDOR_KEYS | API_KEYS,
)
COHERE, JINA, VOYAGE = (
    ServerKind(
        kind,
        ADAPTER,
        API_ADDRESSES[kind],
        is_vendor=True,
        litellm={provider: LiteLLMProvider(key_variable=variable)},
        keys=VENDOR_KEYS | API_KEYS,
    )
    for kind, provider, variable in HOSTED
)
