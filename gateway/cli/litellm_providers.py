"""Upstreams for the providers that LiteLLM names `provider/model`. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Params: TypeAlias = Mapping[str, Any]

# Base URLs of providers with OpenAI's API, and the variable from which LiteLLM takes the key.
OPENAI_APIS: dict[str, tuple[str | None, str | None]] = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "text-completion-openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "mistral": ("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "together_ai": ("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "nvidia_nim": ("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "fireworks_ai": ("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
    "deepinfra": ("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "ollama": ("http://localhost:11434", None),
    "lm_studio": (None, None),
    "litellm_proxy": (None, None),
    "openai_like": (None, None),
    "llamafile": (None, None),
    "xinference": (None, None),
}
HOSTED_APIS = {
    "cohere": ("cohere", "COHERE_API_KEY"),
    "jina_ai": ("jina", "JINA_AI_API_KEY"),
    "voyage": ("voyage", "VOYAGE_API_KEY"),
}
SERVERS = {"infinity": "infinity", "hosted_vllm": "vllm", "vllm": "vllm", "huggingface": "tei"}
AZURE, AZURE_VERSION = "azure", "2024-10-21"


class NotServed(Exception):
    """A provider whose API no backend speaks, or an entry without an address."""


class Provided(NamedTuple):
    """Settings of an upstream, and the variable from which LiteLLM takes a key that is not written."""

    settings: dict[str, Any]
    key_variable: str | None


def upstream_of(provider: str, model: str, base: str | None, params: Params) -> Provided:
    """Return the upstream of a provider's model. base: `api_base`. Raises: NotServed."""
    open_provider = OPENERS.get(provider)
    if open_provider is None:
        raise NotServed(f"no backend speaks the API of {provider!r}")
    return open_provider(provider, model, base, params)


def _openai(provider: str, model: str, base: str | None, _: Params) -> Provided:
    default, variable = OPENAI_APIS[provider]
    address = base or default
    if address is None:
        raise NotServed("it has no `api_base`")
    return Provided({"backend": "openai", "model": model, "replicas": [address]}, variable)


def _azure(_: str, model: str, base: str | None, params: Params) -> Provided:
    if base is None:
        raise NotServed("it has no `api_base`")
    version = params.get("api_version") or AZURE_VERSION
    address = f"{base.rstrip('/')}/openai/deployments/{model}?api-version={version}"
    settings = {"backend": "openai", "model": model, "replicas": [address], "api_key_header": "api-key"}
    return Provided(settings, "AZURE_API_KEY")


def _hosted(provider: str, model: str, base: str | None, _: Params) -> Provided:
    backend, variable = HOSTED_APIS[provider]
    return Provided({"backend": backend, "model": model} | ({"replicas": [base]} if base else {}), variable)


def _server(provider: str, model: str, base: str | None, _: Params) -> Provided:
    if base is None:
        raise NotServed("it has no `api_base`")
    settings: dict[str, Any] = {"backend": SERVERS[provider], "replicas": [base.removesuffix("/v1")]}
    # TEI serves one model, whose name it does not need.
    if provider != "huggingface":
        settings["model"] = model
    if provider == "infinity":
        settings["tokenizer"] = model
    return Provided(settings, None)


OPENERS: dict[str, Callable[[str, str, str | None, Params], Provided]] = {
    AZURE: _azure,
    **dict.fromkeys(OPENAI_APIS, _openai),
    **dict.fromkeys(HOSTED_APIS, _hosted),
    **dict.fromkeys(SERVERS, _server),
}
