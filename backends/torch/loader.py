"""From a checkpoint folder to everything that the engine runs with."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch

from backends.contract import Capabilities, Operation, Output, ScoreKind
from backends.texts import SPECIAL_TOKENS
from backends.tokens import TextTokenizer, open_tokenizer
from backends.torch.checkpoint import Recipe, dense_width, outputs_of, read_recipe
from backends.torch.heads import Head
from backends.torch.kinds import ModelKind, Said
from backends.torch.networks import Placing, Source, open_head
from backends.torch.preparing import Preparer, Template, template_tokens
from backends.torch.sequences import LOGITS, Sequence
from backends.torch.template import pair_template

DTypeName = Literal["float32", "bfloat16", "float16"]
# Tokens of one forward pass. A processor gains nothing from more, and whoever comes next waits for the whole
# batch; a GPU is kept busy only by many.
CPU_BATCH_TOKENS = 1024
GPU_BATCH_TOKENS = 16384
# A later slice of a bigger call must not wait for long behind an earlier one.
BATCH_INPUTS = 32

NOTHING_SAID = Said()


class Loaded(msgspec.Struct, frozen=True):
    """Everything the engine runs with: recipe, ways with texts, network, and what to say about them.

    packed: whether a forward pass computes no padding. batch_tokens: how many tokens one should hold.
    reentrant: whether two may run at once.
    """

    recipe: Recipe
    preparer: Preparer
    head: Head
    capabilities: Capabilities
    packed: bool = False
    batch_tokens: int = CPU_BATCH_TOKENS
    reentrant: bool = True


def load(
    checkpoint: Path,
    model_id: str,
    *,
    dtype: DTypeName | None,
    device: str | None,
    report: Callable[[str], None],
    compiled: bool = False,
    said: Said = NOTHING_SAID,
    trusted: bool = False,
    there: Callable[[Callable[[], int]], int] = lambda warm_up: warm_up(),
) -> Loaded:
    """Read a checkpoint and put its network on a device.

    dtype: None is bfloat16 where the processor multiplies it in hardware, else float32.
    device: None is cuda where there is one, else cpu.
    said: what the operator says of the checkpoint. trusted: whether code beside its weights may run.
    there: runs the first batches where others will be.
    Raises: ModelUnavailable.
    """
    recipe = read_recipe(checkpoint, said)
    place = best_device(device)
    number = _dtype(dtype, place)
    report(f"loading weights as {str(number).removeprefix('torch.')} on {place}")
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens)
    opened = open_head(Source(checkpoint, recipe, tokenizer, trusted), Placing(number, place, compiled))
    template = pair_template(checkpoint) if recipe.kind == "language" else None
    report("compiling; this takes a minute or two" if compiled else "warming up")
    started_s = time.perf_counter()
    width = there(partial(_warm_up, opened.head, tokenizer, recipe, opened.outputs or LOGITS))
    if compiled:
        report(f"compiled in {time.perf_counter() - started_s:.0f} s")
    preparer = Preparer(recipe, tokenizer, opened.outputs, width, template)
    told = msgspec.structs.replace(
        _capabilities(recipe, opened.outputs, width),
        model_id=model_id,
        dtype=str(number).removeprefix("torch."),
        checkpoint=str(checkpoint),
        overhead_tokens=_overhead(recipe, tokenizer, template),
    )
    batch_tokens = CPU_BATCH_TOKENS if place.type == "cpu" else GPU_BATCH_TOKENS
    return Loaded(recipe, preparer, opened.head, told, opened.packed, batch_tokens, opened.reentrant)


def describe(
    checkpoint: Path, model_id: str, dtype: DTypeName | None, device: str | None, said: Said
) -> Capabilities:
    """What a model will be able to do, told by its small files alone.

    Raises: ModelUnavailable.
    """
    recipe = read_recipe(checkpoint, said)
    template = pair_template(checkpoint) if recipe.kind == "language" else None
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens)
    return msgspec.structs.replace(
        _capabilities(recipe, outputs_of(recipe), dense_width(checkpoint, recipe)),
        model_id=model_id,
        dtype=str(_dtype(dtype, best_device(device))).removeprefix("torch."),
        checkpoint=str(checkpoint),
        overhead_tokens=_overhead(recipe, tokenizer, template),
        loaded=False,
    )


def best_device(device: str | None) -> torch.device:
    """The device that is named, or cuda where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _dtype(name: DTypeName | None, place: torch.device) -> torch.dtype:
    named: torch.dtype = getattr(torch, name) if name else _best_dtype(place)
    return named


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu":
        return torch.float32
    capable = torch.cpu.get_capabilities()
    in_hardware = capable.get("amx_bf16") or capable.get("avx512_bf16") or capable.get("sve_bf16")
    return torch.bfloat16 if in_hardware else torch.float32


def _warm_up(head: Head, tokenizer: TextTokenizer, recipe: Recipe, outputs: frozenset[Output]) -> int:
    """Run a few batches, so that no caller pays for what is done once; tells the width of a dense row.

    Several shapes: only when a size has changed does the compiler learn that it can.
    """
    (word,) = tokenizer.explain(["ready"], add_special_tokens=True)
    ids = [token.id for token in word][: recipe.max_tokens]
    width = 0
    for repeats in ((1,), (2, 1, 1), (3, 2)):
        batch = [(ids * times)[: recipe.max_tokens] for times in repeats]
        row = head.run([Sequence(one, [0] * len(one)) for one in batch], outputs)[0]
        width = 0 if row.dense is None else len(row.dense)
    return width


OWN_OPERATIONS: dict[ModelKind, set[Operation]] = {
    "dense": {Operation.EMBED, Operation.ENCODE},
    "sparse": {Operation.ENCODE},
    "multivector": {Operation.ENCODE, Operation.RERANK},
    "classifier": {Operation.CLASSIFY},
    "language": {Operation.RERANK},
}
SCORE_KINDS: dict[ModelKind, ScoreKind] = {
    "multivector": ScoreKind.COSINE,
    "classifier": ScoreKind.SIGMOID,
    "language": ScoreKind.SIGMOID,
}
POOLING_TOLD: dict[ModelKind, str] = {"sparse": "splade", "language": "last_token"}


def _capabilities(recipe: Recipe, outputs: frozenset[Output], width: int | None) -> Capabilities:
    """What follows from a recipe."""
    own = OWN_OPERATIONS[recipe.kind] | {Operation.TOKENIZE, Operation.DETOKENIZE}
    if len(recipe.labels) == 1:
        own |= {Operation.RERANK}
    dense = recipe.kind == "dense"
    return Capabilities(
        model_id="",
        operations=frozenset(own),
        max_input_tokens=recipe.max_tokens,
        batch_inputs=BATCH_INPUTS,
        dimensions=width if dense else None,
        pooling="+".join(recipe.pooling) if dense else POOLING_TOLD.get(recipe.kind),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        reports_input_tokens=True,
        outputs=outputs,
        labels=recipe.labels,
        score_kind=SCORE_KINDS.get(recipe.kind) if Operation.RERANK in own else None,
    )


def _overhead(recipe: Recipe, tokenizer: TextTokenizer, template: Template | None) -> int:
    """What a pair is beside its texts' tokens. A query of late interaction is a sequence of its own."""
    if template is not None:
        return template_tokens(tokenizer, template)
    if recipe.kind != "multivector":
        return 0
    prompts = tokenizer.ids([recipe.prompts["query"], recipe.prompts["document"]])
    # Together the two may be longer than the network takes at a time.
    most = sum(recipe.late.lengths(recipe.max_tokens)) - recipe.max_tokens
    return SPECIAL_TOKENS * 2 + sum(len(ids) for ids in prompts) + max(0, most)
