"""From a checkpoint's weights to a network with what is read off its end, one way for each kind of model."""

import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
import transformers
from torch import nn

from backends.contract import Output
from backends.errors import ModelUnavailable
from backends.tokens import TextTokenizer
from backends.torch.checkpoint import COLBERT_FILE, LEXICAL_FILE, OFFSET_POSITIONS, Recipe
from backends.torch.fusing import fuse
from backends.torch.heads import Classifier, Encoder, Head, Rectangle
from backends.torch.kinds import ModelKind
from backends.torch.language import LanguageHead
from backends.torch.packing import Packed, pack
from backends.torch.precision import Autocast, Product, best_kind, convert
from backends.torch.projection import read_inline_linear, read_linear, read_projections
from backends.torch.readers import (
    LateVectors,
    LexicalTerms,
    NextWord,
    Pooled,
    Reader,
    SpladeTerms,
    token_vectors,
)


class Source(NamedTuple):
    """A checkpoint and what is known of it. trusted: whether code that lies beside its weights may run."""

    checkpoint: Path
    recipe: Recipe
    tokenizer: TextTokenizer
    trusted: bool = False


class Placing(msgspec.Struct, frozen=True):
    """How a network is to run: its products' number format, where, and whether compiled."""

    dtype: torch.dtype
    device: torch.device
    compiled: bool = False


class Opened(NamedTuple):
    """A network ready to run. packed: whether it computes no padding. outputs: what `Encode` may ask for.

    reentrant: whether two passes may run at once.
    """

    head: Head
    packed: bool
    outputs: frozenset[Output]
    reentrant: bool = True


# Where transformers puts code that comes with a checkpoint.
CODE_BESIDE_WEIGHTS = "transformers_modules"
UPDATED_ROTATIONS = frozenset({"dynamic", "longrope"})
# Models that keep something of a pass in themselves.
REMEMBERING = frozenset({"big_bird", "recurrent_gemma"})

Readers: TypeAlias = Mapping[Output, Reader]


def open_head(source: Source, placing: Placing) -> Opened:
    """The network with what is read off its end. Raises: ModelUnavailable."""
    model = _stock(source).to(placing.device).eval()
    reentrant = _is_reentrant(model)
    return OPENERS[source.recipe.kind](model, source, placing)._replace(reentrant=reentrant)


def _open_dense(model: Any, source: Source, placing: Placing) -> Opened:
    recipe, checkpoint = source.recipe, source.checkpoint
    # A sentence's vector is pooled from token vectors; what BERT calls its pooler serves classifiers.
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    after = read_projections(checkpoint, recipe.projections).to(placing.device)
    readers: dict[Output, Reader] = {Output.DENSE: Pooled(recipe.pooling, after)}
    if recipe.lexical:
        layer = read_linear(checkpoint / LEXICAL_FILE).to(placing.device)
        readers[Output.SPARSE] = LexicalTerms(layer, _special_ids(source.tokenizer))
    if recipe.colbert:
        layer = read_linear(checkpoint / COLBERT_FILE).to(placing.device)
        readers[Output.MULTIVECTOR] = LateVectors(layer, drop_first=True, skipped=frozenset())
    return _encoder(model, placing, readers)


def _open_multivector(model: Any, source: Source, placing: Placing) -> Opened:
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    recipe, checkpoint = source.recipe, source.checkpoint
    projection = (
        read_projections(checkpoint, recipe.projections, of_tokens=True)
        if recipe.projections
        else read_inline_linear(checkpoint)
    ).to(placing.device)
    known = (source.tokenizer.token_id(word) for word in recipe.late.skipped)
    unknown = source.tokenizer.token_id("[UNK]")
    skipped = frozenset(one for one in known if one not in {None, unknown})
    readers = {Output.MULTIVECTOR: LateVectors(projection, drop_first=False, skipped=skipped)}
    return _encoder(model, placing, readers)


def _open_sparse(model: Any, source: Source, placing: Placing) -> Opened:
    head = LanguageHead(model)
    encoder = head.take()
    convert(head, _product(placing), placing.dtype)
    terms = SpladeTerms(head, model.config.vocab_size, source.recipe.splade)
    return _encoder(encoder, placing, {Output.SPARSE: terms})


def _open_language(model: Any, source: Source, placing: Placing) -> Opened:
    # Its last layer stays in float32: the difference of two logits is what is left of them.
    head = LanguageHead(model)
    true_id, false_id = _words(source)
    opened = _encoder(head.take(), placing, {Output.DENSE: NextWord(head, true_id, false_id)})
    return opened._replace(outputs=frozenset())


def _open_classifier(model: Any, source: Source, placing: Placing) -> Opened:
    """The stock classifier around an encoder without padding; what it does with token vectors is its own."""
    del source
    prefix = model.base_model_prefix
    packed = _packed(getattr(model, prefix), placing)
    batch = _rectangle(model, placing.device)
    if packed is None:
        return Opened(Classifier(Autocast(model, placing.dtype), batch), packed=False, outputs=frozenset())
    setattr(model, prefix, packed)
    return Opened(Classifier(model, batch), packed=True, outputs=frozenset())


OPENERS: dict[ModelKind, Callable[[Any, Source, Placing], Opened]] = {
    "dense": _open_dense,
    "sparse": _open_sparse,
    "multivector": _open_multivector,
    "classifier": _open_classifier,
    "language": _open_language,
}
# With which of its ends transformers makes a network.
ENDS: dict[ModelKind, Any] = {
    "dense": transformers.AutoModel,
    "sparse": transformers.AutoModelForMaskedLM,
    "multivector": transformers.AutoModel,
    "classifier": transformers.AutoModelForSequenceClassification,
    "language": transformers.AutoModelForCausalLM,
}


def _stock(source: Source) -> Any:
    """The network as transformers makes it, in float32."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        return ENDS[source.recipe.kind].from_pretrained(
            source.checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=source.trusted
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        if source.recipe.has_code and not source.trusted:
            reason = (
                "it comes with code of its own, which runs only where its upstream says "
                "`trust_remote_code: true`"
            )
        raise ModelUnavailable(f"{source.checkpoint} could not be loaded: {reason}") from error


def _encoder(network: Any, placing: Placing, readers: Readers) -> Opened:
    packed = _packed(network, placing)
    batch = _rectangle(network, placing.device, tells_tokens=packed is not None)
    runs = packed or Autocast(network, placing.dtype)
    every = {**readers, Output.TOKENS: token_vectors}
    return Opened(Encoder(runs, batch, every), packed is not None, frozenset(every))


def _packed(encoder: Any, placing: Placing) -> Packed | None:
    """The encoder without padding, where its architecture takes that."""
    config = encoder.config
    first = (config.pad_token_id or 0) + 1 if config.model_type in OFFSET_POSITIONS else 0
    packed = pack(encoder, first)
    if packed is None:
        if placing.compiled:
            raise ModelUnavailable(f"`compile` does not serve models of type {config.model_type}")
        return None
    fuse(packed.encoder)
    convert(packed.encoder, _product(placing), placing.dtype)
    if placing.compiled:
        packed.encoder = _compiled(packed.encoder, placing.device)
    return packed


def _product(placing: Placing) -> Any:
    return Product if placing.compiled else best_kind(placing.device, placing.dtype)


def _compiled(encoder: nn.Module, device: torch.device) -> Any:
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++")):
        raise ModelUnavailable(
            "`compile: true` needs a C++ compiler (g++ or clang++) on the path; install one, or leave it out"
        )
    # Frozen weights can be laid out for the matrix units, as `ArrangedProduct` does without a compiler.
    # Passes beside each other have fewer threads than one that is alone.
    options: dict[str, Any] = {"freezing": True, "cpp.dynamic_threads": True}
    return torch.compile(encoder, dynamic=True, options=options)


def _is_reentrant(model: Any) -> bool:
    """Whether a pass leaves everything as it was: nothing is known of code beside weights, and some rotary
    embeddings write down what the lengths of each batch make of their frequencies.
    """
    if model.config.model_type in REMEMBERING:
        return False
    for module in model.modules():
        told = getattr(module, "rope_type", None)
        kinds = set(told.values()) if isinstance(told, dict) else {told}
        if kinds & UPDATED_ROTATIONS or type(module).__module__.startswith(CODE_BESIDE_WEIGHTS):
            return False
    return True


def _rectangle(model: Any, device: torch.device, *, tells_tokens: bool = False) -> Rectangle:
    config = model.config
    has_type_ids = (
        "token_type_ids" in inspect.signature(model.forward).parameters
        and getattr(config, "type_vocab_size", 0) > 1
    )
    return Rectangle(device, config.pad_token_id or 0, has_type_ids=has_type_ids, tells_tokens=tells_tokens)


def _special_ids(tokenizer: TextTokenizer) -> frozenset[int]:
    """What stands for no word of a text: a text's ends, padding and the unknown."""
    names = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")
    found = (tokenizer.token_id(name) for name in names)
    return frozenset(one for one in found if one is not None)


def _words(source: Source) -> tuple[int, int | None]:
    """The ids of the next tokens that speak for a document, and against it."""
    told = source.recipe.yes_no
    if told.true_id is not None:
        return told.true_id, told.false_id
    yes, no = source.tokenizer.token_id("yes"), source.tokenizer.token_id("no")
    if yes is None or no is None:
        raise ModelUnavailable(
            f"{source.checkpoint} cannot rerank: its vocabulary has no tokens `yes` and `no`"
        )
    return yes, no
