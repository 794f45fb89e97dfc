"""Upstreams for the providers that LiteLLM names `provider/model`. Pure."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from backends.contract import ServerKind
from backends.openai.kind import OPENAI
from backends.registry import KINDS

Params: TypeAlias = Mapping[str, Any]

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


def _azure(_: str, model: str, base: str | None, params: Params) -> Provided:
    if base is None:
        raise NotServed("it has no `api_base`")
    version = params.get("api_version") or AZURE_VERSION
    address = f"{base.rstrip('/')}/openai/deployments/{model}?api-version={version}"
    settings = {"backend": OPENAI.name, "model": model, "replicas": [address], "api_key_header": "api-key"}
    return Provided(settings, "AZURE_API_KEY")


def _served(kind: ServerKind, provider: str, model: str, base: str | None, _: Params) -> Provided:
    known = kind.litellm[provider]
    address = base or known.address
    if address is None and kind.address is None:
        raise NotServed("it has no `api_base`")
    settings: dict[str, Any] = {"backend": kind.name}
    if kind.is_multiple:
        settings["model"] = model
    if address is not None:
        settings["replicas"] = [address.removesuffix(known.suffix)]
    if kind.needs_tokenizer:
        settings["tokenizer"] = model
    return Provided(settings, known.key_variable)


OPENERS: dict[str, Callable[[str, str, str | None, Params], Provided]] = {
    AZURE: _azure,
    **{name: partial(_served, kind) for kind in KINDS.values() for name in kind.litellm},
}
