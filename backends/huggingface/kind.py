"""Settings of Hugging Face's inference, and facts that are known without its adapter."""

from typing import Literal

from backends.contract import VENDOR_KEYS, KindSettings, LiteLLMProvider, ServerKind


class HuggingFaceSettings(KindSettings, frozen=True):
    """Settings of models at the router of Hugging Face. task: the operation that the model is asked for."""

    task: Literal["embed", "rerank"] = "embed"


HUGGINGFACE = ServerKind(
    "huggingface",
    "backends.huggingface.adapter",
    "https://router.huggingface.co/hf-inference/models",
    is_vendor=True,
    settings=HuggingFaceSettings,
    litellm={"huggingface": LiteLLMProvider(key_variable="HUGGINGFACE_API_KEY")},
    keys=VENDOR_KEYS | {"huggingface"},
)
