"""From a checkpoint folder to a network ready to run; the one door to the transformers package."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import torch
import transformers
from torch import nn

from backends.contract import Capabilities, Operation
from backends.errors import ModelUnavailable
from backends.tokens import TextTokenizer, open_tokenizer
from backends.torch.checkpoint import Recipe, read_recipe
from backends.torch.heads import CrossEncoder, Embedder, Head, Network, Padded

DTypeName = Literal["float32", "bfloat16", "float16"]
# Padded tokens of one forward pass. A processor's caches hold the activations of few tokens (measured on
# two cores, MiniLM, 256 texts: 0.71 s at 1,024, 0.76 at 2,048, 0.92 at 4,096, 1.42 at 16,384); a GPU is
# kept busy only by many.
CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 16384
# A later slice of a bigger call must not wait for long behind an earlier one.
BATCH_INPUTS = 32


class Loaded(msgspec.Struct, frozen=True):
    """Everything the engine runs with: recipe, tokenizer, network, and what to say about them."""

    recipe: Recipe
    tokenizer: TextTokenizer
    head: Head
    capabilities: Capabilities
    batch_tokens: int = CPU_BATCH_TOKENS


def load(
    checkpoint: Path,
    model_id: str,
    *,
    dtype: DTypeName | None,
    device: str | None,
    report: Callable[[str], None],
) -> Loaded:
    """Read a checkpoint and put its network on a device.

    dtype: None is bfloat16 where the processor multiplies it in hardware, else float32.
    device: None is cuda where there is one, else cpu.
    Raises: ModelUnavailable.
    """
    recipe = read_recipe(checkpoint)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    number = getattr(torch, dtype) if dtype else _best_dtype(place)
    report(f"loading weights as {str(number).removeprefix('torch.')} on {place}")
    model = _network(checkpoint, recipe, number, place)
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens)
    head = _head(model, number, recipe)
    report("warming up")
    width = _warm_up(head, tokenizer, recipe)
    told = _capabilities(checkpoint, model_id, recipe, number, width)
    batch_tokens = CPU_BATCH_TOKENS if place.type == "cpu" else GPU_BATCH_TOKENS
    return Loaded(recipe, tokenizer, head, told, batch_tokens)


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32
    capable = torch.cpu.get_capabilities()
    in_hardware = capable.get("amx_bf16") or capable.get("avx512_bf16") or capable.get("sve_bf16")
    return torch.bfloat16 if in_hardware else torch.float32


def _network(checkpoint: Path, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The network with its matrix products in `dtype` and everything between them in float32.

    Rounding the sums between layers too would make a text's vector depend on the batch that it shares:
    measured on MiniLM in bfloat16, 1.4e-4 of cosine against 0.5e-4, for a tenth of the time.
    """
    kind = (
        transformers.AutoModelForSequenceClassification if recipe.task == "rerank" else transformers.AutoModel
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        model: nn.Module = kind.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise ModelUnavailable(f"{checkpoint} could not be loaded: {reason}") from error
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.to(dtype)
    return model.to(device).eval()


def _head(model: nn.Module, dtype: torch.dtype, recipe: Recipe) -> Head:
    config = model.config
    has_type_ids = (
        "token_type_ids" in inspect.signature(model.forward).parameters
        and getattr(config, "type_vocab_size", 0) > 1
    )
    batch = Padded(model, getattr(config, "pad_token_id", None) or 0, has_type_ids=has_type_ids)
    network = Network(model, dtype)
    if recipe.task == "rerank":
        return CrossEncoder(network, batch)
    return Embedder(network, batch, recipe.pooling)


def _warm_up(head: Head, tokenizer: TextTokenizer, recipe: Recipe) -> int:
    """Run once, so that the first caller does not pay for it; tells the width of a row."""
    word = [token.id for token in tokenizer.explain(["ready"], add_special_tokens=True)[0]]
    ids = word[: recipe.max_tokens]
    return int(head.run([ids], [[0] * len(ids)], [0]).shape[1])


def _capabilities(
    checkpoint: Path, model_id: str, recipe: Recipe, dtype: torch.dtype, width: int
) -> Capabilities:
    own = Operation.RERANK if recipe.task == "rerank" else Operation.EMBED
    return Capabilities(
        model_id=model_id,
        operations=frozenset({own, Operation.TOKENIZE}),
        max_input_tokens=recipe.max_tokens,
        batch_inputs=BATCH_INPUTS,
        dimensions=width if recipe.task == "embed" else None,
        pooling="+".join(recipe.pooling) if recipe.task == "embed" else None,
        dtype=str(dtype).removeprefix("torch."),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        checkpoint=str(checkpoint),
    )
