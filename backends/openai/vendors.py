"""Vendors whose API is OpenAI's, one row each, and the choice of a shape for an upstream.

Source: the vendors' API references and the clients of LiteLLM and LangChain; bounds that neither states are
absent. A row is chosen by `vendor`, or by the host of the base URL.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from backends.openai.settings import ApiSettings, VendorName
from backends.openai.shapes import OPENAI, SHAPES, ApiShape


class Vendor(msgspec.Struct, frozen=True):
    """One vendor.

    address: base URL. key_variable: of the environment, in which its clients look for the key. hosts: further
    ones of the same API. litellm: LiteLLM's names. provider: OpenTelemetry's name, if it has one.
    """

    address: str
    key_variable: str
    shape: ApiShape
    hosts: tuple[str, ...] = ()
    litellm: tuple[str, ...] = ()
    provider: str | None = None


def _shape(version: str, **differences: object) -> ApiShape:
    return msgspec.structs.replace(OPENAI, version=version, metered=True, **differences)


# Fields that keep documents out of replies.
NO_DOCUMENTS = {"return_documents": False}
VENDORS: Mapping[VendorName, Vendor] = {
    "deepinfra": Vendor(
        "https://api.deepinfra.com/v1/openai",
        "DEEPINFRA_API_KEY",
        _shape("DeepInfra API", rerank="/v1/inference/{model}", rerank_form="pairs", embed_inputs=1024),
        litellm=("deepinfra",),
    ),
    "fireworks": Vendor(
        "https://api.fireworks.ai/inference/v1",
        "FIREWORKS_AI_API_KEY",
        _shape("Fireworks API", rerank="rerank", rerank_fields=NO_DOCUMENTS),
        litellm=("fireworks_ai",),
    ),
    "mistral": Vendor(
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        _shape("Mistral API", embed_inputs=256, request_tokens=16_000),
        litellm=("mistral",),
        provider="mistral_ai",
    ),
    "nebius": Vendor(
        "https://api.studio.nebius.com/v1",
        "NEBIUS_API_KEY",
        _shape("Nebius API"),
        hosts=("api.studio.nebius.ai", "api.tokenfactory.nebius.com"),
        litellm=("nebius",),
    ),
    "openai": Vendor(
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        _shape("OpenAI API", embed_inputs=2048, request_tokens=300_000),
        litellm=("openai", "text-completion-openai"),
        provider="openai",
    ),
    "openrouter": Vendor(
        "https://openrouter.ai/api/v1",
        "OPENROUTER_API_KEY",
        _shape("OpenRouter API", rerank="rerank"),
        litellm=("openrouter",),
    ),
    "siliconflow": Vendor(
        "https://api.siliconflow.cn/v1",
        "SILICONFLOW_API_KEY",
        _shape("SiliconFlow API", rerank="rerank", rerank_fields=NO_DOCUMENTS),
        hosts=("api.siliconflow.com",),
    ),
    "together": Vendor(
        "https://api.together.ai/v1",
        "TOGETHER_API_KEY",
        _shape("Together API", rerank="rerank", rerank_fields=NO_DOCUMENTS),
        hosts=("api.together.xyz",),
        litellm=("together_ai",),
    ),
}
NAMES_BY_HOST: Mapping[str, VendorName] = {
    host: name
    for name, vendor in VENDORS.items()
    for host in (urlsplit(vendor.address).hostname or "", *vendor.hosts)
}


def vendor_at(address: str) -> Vendor | None:
    """Return the vendor whose API is at an address, None if it is not known to be one's."""
    name = NAMES_BY_HOST.get(urlsplit(address).hostname or "")
    return None if name is None else VENDORS[name]


def vendor_of(settings: ApiSettings, address: str = "") -> Vendor | None:
    """Return the vendor of an upstream of kind `openai`, None if it is not one's."""
    if settings.kind != "openai":
        return None
    return vendor_at(address) if settings.vendor is None else VENDORS[settings.vendor]


# Voyage's models with images have a path and a form of inputs of their own, also for texts.
VOYAGE_MULTIMODAL = "voyage-multimodal"
# So have those that embed chunks in their context. They have no field for inputs that are too long.
VOYAGE_CONTEXT = "voyage-context"
PERPLEXITY_CONTEXT = "pplx-embed-context"
# Rerankers that read images, of Jina and of NVIDIA.
JINA_MULTIMODAL_RANKER = "jina-reranker-m0"
NIM_MULTIMODAL_RANKER = "rerank-vl"
# Models of other names would embed the letters of a picture.
NIM_MULTIMODAL_EMBEDDER = "embed-vl"
# Jina's models that take `late_chunking`.
JINA_LATE_CHUNKING = frozenset({"jina-embeddings-v3", "jina-embeddings-v4"})


def shape_of(settings: ApiSettings, model: str | None = None, address: str = "") -> ApiShape:
    """Return the shape of a kind or vendor with the settings of an upstream in place of its own.

    model: its name. address: base URL.
    """
    vendor, name = vendor_of(settings, address), model or ""
    shape = SHAPES[settings.kind] if vendor is None else vendor.shape
    if settings.kind == "voyage" and name.startswith(VOYAGE_MULTIMODAL):
        shape = msgspec.structs.replace(
            shape,
            embeddings="multimodalembeddings",
            rerank=None,
            inputs="inputs",
            base64={"output_encoding": "base64"},
            media="content",
        )
    if settings.kind == "voyage" and name.startswith(VOYAGE_CONTEXT):
        shape = msgspec.structs.replace(
            shape,
            embeddings="contextualizedembeddings",
            rerank=None,
            inputs="inputs",
            truncation={},
            chunks="lists",
        )
    if settings.kind == "perplexity" and name.startswith(PERPLEXITY_CONTEXT):
        shape = msgspec.structs.replace(shape, embeddings="contextualizedembeddings", chunks="lists")
    if settings.kind == "jina" and name in JINA_LATE_CHUNKING:
        shape = msgspec.structs.replace(shape, chunks="field")
    if settings.kind == "jina" and name == JINA_MULTIMODAL_RANKER:
        shape = msgspec.structs.replace(shape, rerank_media="objects")
    if settings.kind == "nim" and NIM_MULTIMODAL_EMBEDDER in name:
        shape = msgspec.structs.replace(shape, media="strings")
    if settings.kind == "nim" and NIM_MULTIMODAL_RANKER in name:
        shape = msgspec.structs.replace(shape, rerank_media="passages")
    types = shape.input_type if settings.input_type is None else settings.input_type
    return msgspec.structs.replace(
        shape,
        embeddings=settings.embeddings or shape.embeddings,
        rerank=settings.rerank or shape.rerank,
        input_type=types,
        metered=shape.metered or settings.metered,
    )
