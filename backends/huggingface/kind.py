"""Settings of Hugging Face's inference, and facts that are known without its adapter."""

from typing import Literal

from backends.contract import VENDOR_KEYS, KindSettings, ServerKind


class HuggingFaceSettings(KindSettings, frozen=True):
    """Settings of models at the router of Hugging Face. task: the operation that the model is asked for."""

    task: Literal["embed", "rerank"] = "embed"


HUGGINGFACE = ServerKind(
    "huggingface",
    "backends.huggingface.adapter",
    "https://router.huggingface.co/hf-inference/models",
    is_vendor=True,
    settings=HuggingFaceSettings,
    keys=VENDOR_KEYS | {"huggingface"},
)
