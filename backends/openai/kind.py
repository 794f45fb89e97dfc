"""Facts about servers of OpenAI's API and its relatives that are known without their adapter."""

from typing import Literal, TypeAlias

from backends.contract import REMOTE_KEYS, VENDOR_KEYS, Ask, LiteLLMProvider, ServerKind, listed_models
from backends.openai.settings import ApiKind
from backends.openai.vendors import VENDORS

ADAPTER = "backends.openai.adapter"
# Base URLs of the providers; servers of OpenAI's own API are run by many.
API_ADDRESSES: dict[ApiKind, str | None] = {
    "openai": None,
    "cohere": "https://api.cohere.com/v2",
    "jina": "https://api.jina.ai/v1",
    "voyage": "https://api.voyageai.com/v1",
    "perplexity": "https://api.perplexity.ai/v1",
}
API_KEYS = frozenset({"embeddings", "rerank", "input_type", "extra_body", "task"})
HostedName: TypeAlias = Literal["cohere", "jina", "voyage", "perplexity"]
# Kind, LiteLLM's name of it, and the variable from which LiteLLM takes its key.
HOSTED: tuple[tuple[HostedName, str, str], ...] = (
    ("cohere", "cohere", "COHERE_API_KEY"),
    ("jina", "jina_ai", "JINA_AI_API_KEY"),
    ("voyage", "voyage", "VOYAGE_API_KEY"),
    ("perplexity", "perplexity", "PERPLEXITYAI_API_KEY"),
)


def _recognize(ask: Ask) -> tuple[str, ...] | None:
    return listed_models(ask("/v1/models")) or None


OPENAI = ServerKind(
    "openai",
    ADAPTER,
    recognize=_recognize,
    litellm={
        **{
            name: LiteLLMProvider(vendor.address, vendor.key_variable)
            for vendor in VENDORS.values()
            for name in vendor.litellm
        },
        "ollama": LiteLLMProvider("http://localhost:11434"),
        **dict.fromkeys(
            ("lm_studio", "litellm_proxy", "openai_like", "llamafile", "xinference"), LiteLLMProvider()
        ),
    },
    keys=REMOTE_KEYS | VENDOR_KEYS | API_KEYS | {"vendor"},
    address_hint="a list of base URLs, http://host:port, or `vendor` in place of them",
)
COHERE, JINA, VOYAGE, PERPLEXITY = (
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
