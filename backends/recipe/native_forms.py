"""Networks that transformers implements, under the names of their publishers' own code.

Such a checkpoint names code in `auto_map`, which the engine does not need: it reads the configuration and the
tensors under transformers' names. Pure; `native_configs` builds the configurations.
Sources: xlm-roberta-flash-implementation and jina-embeddings-v5-text-small of jinaai; vLLM 0.32.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from backends.checkpoints.auto_map import read_auto_map
from backends.recipe.recipe import PoolingMode

# Names of their own classes.
JINA_V3, JINA_V5 = "XLMRobertaLoRA", "JinaEmbeddingsV5Model"


class NativeForm(NamedTuple):
    """Network of transformers for a checkpoint with other names.

    names: pattern of a tensor's name → its replacement, as `from_pretrained` takes them. adapters: ends of
    names of tensors that are no part of the network. needs_adapter: True if its own code computes nothing
    without one. pooling, prompts, default_prompt: values that only its own code states.
    """

    architecture: str
    names: Mapping[str, str] = {}
    adapters: tuple[str, ...] = ()
    needs_adapter: bool = False
    pooling: tuple[PoolingMode, ...] = ()
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None


FORMS = (
    NativeForm(
        JINA_V3,
        names={r"^roberta\.": "", r"\.parametrizations\.weight\.original$": ".weight"},
        adapters=(".lora_A", ".lora_B"),
    ),
    NativeForm(
        JINA_V5,
        needs_adapter=True,
        pooling=("lasttoken",),
        prompts={"query": "Query: ", "document": "Document: "},
        default_prompt="document",
    ),
)


def native_form(config: Mapping[str, Any]) -> NativeForm | None:
    """Return the form in which transformers has a checkpoint's network, None if it needs none.

    config: content of config.json.
    """
    # Jina's third model names the class only as code.
    code = read_auto_map(config).get("AutoModel")
    names = {*(config.get("architectures") or []), *([code.name] if code else [])}
    return next((form for form in FORMS if form.architecture in names), None)
