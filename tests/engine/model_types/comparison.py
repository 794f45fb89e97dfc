"""Comparison of the engine with `AutoModel`, for one type of network."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoTokenizer

from backends.contract import Embed, EmbedReply, Vectors
from backends.contract.errors import BackendError, ModelUnavailable
from backends.torch import wire
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.engines import cosines
from tests.engine.families.vocabularies import ROBERTA, tokenizer_json, vocabulary_size
from tests.engine.model_types.small_configs import reads_text, small_config

State = Literal["equal", "refused", "wrong", "no checkpoint"]
LEAST_COSINE = 0.9999
# A tokenizer that states this cuts the last text.
TOKENS_MAX = 300
SENTENCE = "the quick brown fox jumps over a lazy dog and returns values of all keys in this list"
WORDS = SENTENCE.split()
TEXTS = (
    "fox",
    "the lazy dog",
    "<mask> in a list </s> and <pad> and <s> behind it",
    *(" ".join((WORDS * 30)[start : start + words]) for start, words in ((2, 9), (5, 20), (1, 60), (3, 120))),
    " ".join(WORDS * 20),
)
# With the usual 0.02 a layer hardly changes its input, and a comparison would prove nothing.
SPREADS = (0.2, 0.08, 0.02)
# Numbers in the largest network that is written.
ELEMENTS_MAX = 10_000_000
MORE_THAN_TEXT = "its network takes more than a text"
T5_TYPES = frozenset({"t5", "mt5", "umt5"})
# Texts that are more alike than this show nothing.
ALIKE = 0.9999


class Outcome(NamedTuple):
    """Outcome for a type. detail: reason of a refusal, or least cosine. packed: as the engine has it."""

    model_type: str
    state: State
    detail: str = ""
    packed: bool | None = None


def compare(model_type: str, folder: Path, **keys: Any) -> Outcome:
    """Return the outcome for a type. keys: of its configuration."""
    transformers.utils.logging.set_verbosity_error()
    if not reads_text(model_type):
        return Outcome(model_type, "no checkpoint", MORE_THAN_TEXT)
    fault = write_checkpoint(model_type, folder, keys)
    if not (folder / "model.safetensors").is_file():
        return Outcome(model_type, "no checkpoint", fault)
    try:
        loaded = load(folder, "tiny", LoadOptions("float32", "cpu"))
    except ModelUnavailable as error:
        reason = error.message.replace(str(folder), "it")
        if fault and "has `model_type`" not in reason:
            return Outcome(model_type, "no checkpoint", f"transformers: {fault}")
        return Outcome(model_type, "refused", reason)
    if fault:
        return Outcome(model_type, "no checkpoint", f"transformers: {fault}", loaded.packed)
    expected = expected_vectors(folder, loaded.recipe.pooling, loaded.recipe.max_tokens)
    try:
        found = asyncio.run(engine_vectors(loaded))
    except BackendError as error:
        return Outcome(model_type, "wrong", f"the engine fails: {error.message}", loaded.packed)
    inspected = inspect_folder(wire.ModelBoot("tiny", str(folder), dtype="float32", device="cpu"), folder)
    if inspected.refusal is not None or inspected.packed not in {None, loaded.packed}:
        detail = f"an inspection says: packed {inspected.packed}, {inspected.refusal}"
        return Outcome(model_type, "wrong", detail, loaded.packed)
    cosine = min(float(cosines(rows, expected).min()) for rows in found)
    state: State = "equal" if cosine >= LEAST_COSINE else "wrong"
    return Outcome(model_type, state, f"{cosine:.6f}", loaded.packed)


def write_checkpoint(model_type: str, folder: Path, keys: dict[str, Any]) -> str:
    """Write random weights with which texts differ; return why transformers cannot compute them, or ""."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(ROBERTA))
    tokenizer_config = dict(ROBERTA.roles) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": TOKENS_MAX,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": TOKENS_MAX}))
    fault = ""
    for spread in SPREADS:
        try:
            network = random_network(model_type, keys, spread)
            network.save_pretrained(folder)
            vectors = expected_vectors(folder, ("mean",))
        except Exception as error:  # noqa: BLE001 - whatever the code of a type raises for small sizes
            return first_line(error)
        if np.isfinite(vectors).all() and cosines(vectors[:1], vectors[1:]).min() < ALIKE:
            return ""
        fault = "its vectors are all alike" if np.isfinite(vectors).all() else "its vectors are not finite"
    return fault


def random_network(model_type: str, keys: dict[str, Any], spread: float) -> Any:
    """Return a network of a small size. Raises: whatever the code of the type raises."""
    config = small_config(model_type, vocabulary_size(ROBERTA), keys)
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
    if elements > ELEMENTS_MAX:
        raise ValueError(f"{elements} numbers at the small sizes")
    torch.manual_seed(7)
    network = AutoModel.from_config(small_config(model_type, vocabulary_size(ROBERTA), keys)).eval().float()
    randomize(network, spread)
    return network


def randomize(network: nn.Module, spread: float) -> None:
    """Set matrices to random numbers, and move the others a little."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread)
            else:
                parameter.add_(torch.randn_like(parameter) * spread / 2)


@torch.inference_mode()
def expected_vectors(folder: Path, pooling: Sequence[str], max_tokens: int = TOKENS_MAX) -> Vectors:
    """Return the vector of each text alone, as transformers computes it: (n, dim)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    if network.config.model_type in T5_TYPES:
        # As sentence-transformers reads them.
        network = network.get_encoder()
    rows = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        hidden = network(**inputs).last_hidden_state[0].float()
        rows.append(np.concatenate([POOLINGS[mode](hidden).numpy() for mode in pooling]))
    return np.stack(rows)


POOLINGS = {
    "mean": lambda hidden: hidden.mean(dim=0),
    "cls": lambda hidden: hidden[0],
    "lasttoken": lambda hidden: hidden[-1],
}


async def engine_vectors(loaded: LoadedModel) -> list[Vectors]:
    """Return the vectors of all texts in one batch, and of one text after the other, the longest first."""
    engine = Engine(loaded, batch_tokens=4096, queue_tokens=10**6)
    together = await _embed(engine, TEXTS)
    apart = [await _embed(engine, (text,)) for text in reversed(TEXTS)]
    return [together, np.concatenate(apart[::-1])]


async def _embed(engine: Engine, texts: Sequence[str]) -> Vectors:
    reply = await engine.run(Embed(tuple(texts), normalize=False))
    assert isinstance(reply, EmbedReply)
    return reply.vectors


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
