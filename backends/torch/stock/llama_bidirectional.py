"""Llama whose tokens attend in both directions, as the llama-nemotron embedders and rerankers have it.

Published checkpoints bring their own code for it, which replaces internals of one version of transformers.
The classes here are registered in its place.
Source: llama_bidirectional in NeMo Automodel.
"""

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.models.llama import LlamaConfig, LlamaForSequenceClassification, LlamaModel

from backends.contract.errors import ModelUnavailable
from backends.recipe.recipe import PoolingMode

# Names of poolings in config.json.
POOLINGS: dict[str, PoolingMode] = {"avg": "mean", "cls": "cls", "last": "lasttoken"}


class LlamaBidirectionalConfig(LlamaConfig):  # type: ignore[misc]
    """Configuration with the classifier's pooling, and the number by which its logits are divided."""

    model_type = "llama_bidirec"

    is_causal: bool = False
    pooling: str = "avg"
    temperature: float = 1.0


class LlamaBidirectionalModel(LlamaModel):  # type: ignore[misc]
    """Encoder without a causal mask."""

    config_class = LlamaBidirectionalConfig


class LlamaBidirectionalForSequenceClassification(LlamaForSequenceClassification):  # type: ignore[misc]
    """Classifier on the pooled token vectors of the encoder. The engine pools; see `pooled_head`."""

    config_class = LlamaBidirectionalConfig


# Names of these classes by the auto class that builds them.
CLASS_NAMES = {
    "AutoConfig": LlamaBidirectionalConfig.__name__,
    "AutoModel": LlamaBidirectionalModel.__name__,
    "AutoModelForSequenceClassification": LlamaBidirectionalForSequenceClassification.__name__,
}


def register() -> None:
    """Have transformers build these classes for their `model_type`, in place of a checkpoint's own code."""
    AutoConfig.register(LlamaBidirectionalConfig.model_type, LlamaBidirectionalConfig, exist_ok=True)
    AutoModel.register(LlamaBidirectionalConfig, LlamaBidirectionalModel, exist_ok=True)
    classes = (LlamaBidirectionalConfig, LlamaBidirectionalForSequenceClassification)
    AutoModelForSequenceClassification.register(*classes, exist_ok=True)


def pooled_head(model: Any) -> tuple[PoolingMode, nn.Module]:
    """Return the pooling of a language model's classifier, and its layer from a pooled vector to logits.

    Raises: ModelUnavailable if the pooling is not known.
    """
    head: nn.Linear = model.score.float()
    if not isinstance(model, LlamaBidirectionalForSequenceClassification):
        return "lasttoken", head
    pooling = POOLINGS.get(model.config.pooling)
    if pooling is None:
        raise ModelUnavailable(
            f"the classifier has the pooling {model.config.pooling!r}; known are: {', '.join(POOLINGS)}"
        )
    head.weight.data /= model.config.temperature
    return pooling, head
