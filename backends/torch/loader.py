"""From a checkpoint folder to a network ready to run; the one door to the transformers package."""

import inspect
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transformers
from torch import nn

from backends.contract import Capabilities, Operation
from backends.errors import ModelUnavailable
from backends.tokens import TextTokenizer, open_tokenizer
from backends.torch.checkpoint import OFFSET_POSITIONS, Recipe, read_recipe
from backends.torch.heads import CrossEncoder, Embedder, Head, Rectangle
from backends.torch.packing import Packed, pack
from backends.torch.precision import Autocast, Product, best_kind, convert
from backends.torch.projection import read_projections

logger = logging.getLogger(__name__)

DTypeName = Literal["float32", "bfloat16", "float16"]
# Tokens of one forward pass. A processor gains little from more (two cores, MiniLM, no padding: 252 texts/s
# at 1,024, 260 at 2,048, 267 at 4,096), and whoever comes next waits for the whole batch; a GPU is kept busy
# only by many.
CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 16384
# A later slice of a bigger call must not wait for long behind an earlier one.
BATCH_INPUTS = 32


class Loaded(msgspec.Struct, frozen=True):
    """Everything the engine runs with: recipe, tokenizer, network, and what to say about them.

    packed: whether a forward pass computes no padding. batch_tokens: how many tokens one should hold.
    """

    recipe: Recipe
    tokenizer: TextTokenizer
    head: Head
    capabilities: Capabilities
    packed: bool = False
    batch_tokens: int = CPU_BATCH_TOKENS


class Placing(msgspec.Struct, frozen=True):
    """How a network is to run: its products' number format, where, and whether compiled."""

    dtype: torch.dtype
    device: torch.device
    compiled: bool = False


def load(
    checkpoint: Path,
    model_id: str,
    *,
    dtype: DTypeName | None,
    device: str | None,
    report: Callable[[str], None],
    compiled: bool = False,
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
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens)
    head, packed = _head(checkpoint, recipe, Placing(number, place, compiled))
    report("compiling; this takes a minute or two" if compiled else "warming up")
    started_s = time.perf_counter()
    width = _warm_up(head, tokenizer, recipe)
    if compiled:
        report(f"compiled in {time.perf_counter() - started_s:.0f} s")
    told = _capabilities(checkpoint, model_id, recipe, number, width)
    batch_tokens = CPU_BATCH_TOKENS if place.type == "cpu" else GPU_BATCH_TOKENS
    return Loaded(recipe, tokenizer, head, told, packed, batch_tokens)


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32
    capable = torch.cpu.get_capabilities()
    in_hardware = capable.get("amx_bf16") or capable.get("avx512_bf16") or capable.get("sve_bf16")
    return torch.bfloat16 if in_hardware else torch.float32


def _head(checkpoint: Path, recipe: Recipe, placing: Placing) -> tuple[Head, bool]:
    """The network with what is read off its end, and whether it computes no padding."""
    model = _stock(checkpoint, recipe).to(placing.device).eval()
    batch = _rectangle(model, placing.device)
    if recipe.task == "rerank":
        classifier = _classifier(model, placing)
        return CrossEncoder(classifier, batch), not isinstance(classifier, Autocast)
    # A sentence's vector is pooled from token vectors; what BERT calls its pooler serves classifiers.
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    packed = _encoder(model, placing)
    after = read_projections(checkpoint, recipe.projections).to(placing.device)
    encoder = packed or Autocast(model, placing.dtype)
    return Embedder(encoder, batch, recipe.pooling, after), packed is not None


def _stock(checkpoint: Path, recipe: Recipe) -> Any:
    """The network as transformers makes it, in float32."""
    kind = (
        transformers.AutoModelForSequenceClassification if recipe.task == "rerank" else transformers.AutoModel
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        return kind.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise ModelUnavailable(f"{checkpoint} could not be loaded: {reason}") from error


def _encoder(encoder: Any, placing: Placing) -> Packed | None:
    """The encoder without padding, where its architecture takes that."""
    config = encoder.config
    first = (config.pad_token_id or 0) + 1 if config.model_type in OFFSET_POSITIONS else 0
    packed = pack(encoder, first)
    if packed is None:
        if placing.compiled:
            raise ModelUnavailable(f"`compile` does not serve models of type {config.model_type}")
        return None
    convert(packed.encoder, Product if placing.compiled else best_kind(placing.device), placing.dtype)
    if placing.compiled:
        packed.encoder = _compiled(packed.encoder, placing.device)
    return packed


def _compiled(encoder: nn.Module, device: torch.device) -> Any:
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++")):
        raise ModelUnavailable(
            "`compile: true` needs a C++ compiler (g++ or clang++) on the path; install one, or leave it out"
        )
    # Frozen weights can be laid out for the matrix units, as `ArrangedProduct` does without a compiler.
    return torch.compile(encoder, dynamic=True, options={"freezing": True})


def _classifier(model: Any, placing: Placing) -> nn.Module:
    """The stock classifier around an encoder without padding; what it does with token vectors is its own."""
    prefix = model.base_model_prefix
    packed = _encoder(getattr(model, prefix), placing)
    if packed is None:
        return Autocast(model, placing.dtype)
    setattr(model, prefix, packed)
    return model


def _rectangle(model: Any, device: torch.device) -> Rectangle:
    config = model.config
    has_type_ids = (
        "token_type_ids" in inspect.signature(model.forward).parameters
        and getattr(config, "type_vocab_size", 0) > 1
    )
    return Rectangle(device, config.pad_token_id or 0, has_type_ids=has_type_ids)


def _warm_up(head: Head, tokenizer: TextTokenizer, recipe: Recipe) -> int:
    """Run a few batches, so that no caller pays for what is done once; tells the width of a row.

    Several shapes: only when a size has changed does the compiler learn that it can.
    """
    (word,) = tokenizer.explain(["ready"], add_special_tokens=True)
    ids = [token.id for token in word][: recipe.max_tokens]
    width = 0
    for repeats in ((1,), (2, 1, 1), (3, 2)):
        batch = [(ids * times)[: recipe.max_tokens] for times in repeats]
        width = head.run(batch, [[0] * len(one) for one in batch], [0] * len(batch)).shape[1]
    return width


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
        tells_input_tokens=True,
    )
