"""Network with its readers, made ready to run; the same for our own networks and those of transformers."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import nn

from backends.checkpoints.auto_map import ClassReference
from backends.contract import Output
from backends.contract.errors import ModelUnavailable
from backends.recipe.adapter_choice import Adapter
from backends.recipe.options import Runtime
from backends.recipe.recipe import COLBERT_FILE, LEXICAL_FILE, Recipe
from backends.recipe.rerank_template import RerankTemplate
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import Head
from backends.torch.networks.heads import Encoder, InputBuilder, TableHead
from backends.torch.networks.packing import PackedEncoder
from backends.torch.networks.pass_graphs import PassGraphs
from backends.torch.networks.precision import CastLinear, fastest_linear, replace_linears
from backends.torch.networks.projection import (
    read_inline_linear,
    read_linear,
    read_projections,
    read_sentence_projections,
    read_terms,
)
from backends.torch.networks.readers import (
    LateReader,
    LexicalReader,
    PooledReader,
    Reader,
    SpladeReader,
    read_token_vectors,
)

# Chooses between runtimes, and returns a note.
Choose: TypeAlias = Callable[[], str]
Readers: TypeAlias = Mapping[Output, Reader]


class OwnCode(NamedTuple):
    """Classes that define a network. config: None for transformers' own class of the `model_type`."""

    model: ClassReference
    config: ClassReference | None

    @property
    def classes(self) -> list[ClassReference]:
        """Both classes, without an absent one."""
        return [self.model] if self.config is None else [self.model, self.config]

    @property
    def outside(self) -> list[ClassReference]:
        """Classes that lie in another repository than the weights."""
        return [reference for reference in self.classes if reference.repository is not None]


class TrustedCode(NamedTuple):
    """Code that the operator permits, and the folder with its files."""

    code: OwnCode
    folder: Path


class NetworkFacts(NamedTuple):
    """Properties of a network that its tokenizer has to fit.

    words: rows of its table of tokens, types: rows of that of type ids; None if no file states them.
    """

    words: int | None = None
    types: int | None = None
    takes_type_ids: bool = True


class NetworkSource(NamedTuple):
    """Checkpoint with its recipe, its tokenizer and the template of the pairs that it scores.

    code: the checkpoint's own, which the operator permits and its network needs. adapter: merged into the
    weights.
    """

    checkpoint: Path
    recipe: Recipe
    tokenizer: TextTokenizer
    template: RerankTemplate
    code: TrustedCode | None = None
    adapter: Adapter | None = None


class Placement(msgspec.Struct, frozen=True):
    """Number format of a network's matrix products, its device, and True if it is compiled.

    runtime: what computes passes of one text.
    """

    dtype: torch.dtype
    device: torch.device
    compiled: bool = False
    runtime: Runtime = "torch"

    def linear_type(self, dtype: torch.dtype) -> Any:
        """Return the type of linear layer that is fastest in a number format."""
        return CastLinear if self.compiled else fastest_linear(self.device, dtype)


class OpenedNetwork(NamedTuple):
    """Network ready to run.

    packed: True if it computes no padding. outputs: those that `Encode` may request. reentrant: True if two
    passes may run at once. notes: measurements of the load, for operators. choose: chooses between runtimes
    by measuring, on a thread that computes, and returns a note.
    """

    head: Head
    packed: bool
    outputs: frozenset[Output]
    reentrant: bool = True
    notes: tuple[str, ...] = ()
    choose: Choose | None = None


class RunnableEncoder(NamedTuple):
    """Encoder, the builder of its inputs, and what chooses its runtime.

    network: a `PackedEncoder`, or a module that computes padding.
    """

    network: nn.Module
    inputs: InputBuilder
    choose: Choose | None = None

    @property
    def packed(self) -> bool:
        """True if the encoder computes no padding."""
        return isinstance(self.network, PackedEncoder)

    def opened(self, readers: Readers, projection: nn.Module | None = None) -> OpenedNetwork:
        """Put readers behind the encoder. projection: as `Encoder` takes it."""
        all_readers = {**readers, Output.TOKENS: read_token_vectors}
        head = Encoder(self.network, self.inputs, all_readers, projection)
        return OpenedNetwork(head, self.packed, frozenset(all_readers), choose=self.choose)


def finish_packed(packed: PackedEncoder, placement: Placement) -> None:
    """Give an encoder's linear layers their number format, and compile it if the operator asks for that."""
    replace_linears(packed.encoder, placement.linear_type(placement.dtype), placement.dtype)
    if placement.compiled:
        packed.encoder = compiled(packed.encoder, placement.device)


def compiled(encoder: nn.Module, device: torch.device) -> Any:
    """Return a compiled encoder. Raises: ModelUnavailable."""
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++")):
        raise ModelUnavailable(
            "`compile: true` needs a C++ compiler (g++ or clang++) on the path; install one, or leave it out"
        )
    # Frozen weights can be laid out for the matrix units, as `PrepackedLinear` does without a compiler.
    # Concurrent passes have fewer threads each than a single pass.
    options: dict[str, Any] = {"freezing": True, "cpp.dynamic_threads": True}
    return torch.compile(encoder, dynamic=True, options=options)


def recording(packed: PackedEncoder, inputs: InputBuilder, placement: Placement) -> Choose | None:
    """Return what records passes of a packed encoder, None for another device than a GPU."""
    if placement.device.type != "cuda":
        return None
    type_ids = ("token_type_ids",) if inputs.has_type_ids else ()
    packed.graphs = PassGraphs(placement.device, ("input_ids", "position_ids", *type_ids))
    return partial(packed.graphs.choose, packed.encoder)


def open_dense(encoder: RunnableEncoder, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    """Put the readers of vectors, of BGE-M3's terms and its token vectors behind an encoder."""
    recipe, checkpoint, device = source.recipe, source.checkpoint, placement.device
    projections = read_sentence_projections(checkpoint, recipe).to(device)
    readers: dict[Output, Reader] = {Output.DENSE: PooledReader(recipe.pooling, projections)}
    if recipe.lexical:
        layer = read_linear(checkpoint / LEXICAL_FILE).to(device)
        readers[Output.SPARSE] = LexicalReader(layer, _special_ids(source.tokenizer))
    if recipe.colbert:
        layer = read_linear(checkpoint / COLBERT_FILE).to(device)
        readers[Output.MULTIVECTOR] = LateReader(layer, drop_first=True, skipped=frozenset())
    projection = None
    if recipe.token_projections:
        projection = read_projections(checkpoint, recipe.token_projections, of_tokens=True).to(device)
    return encoder.opened(readers, projection)


def open_multivector(encoder: RunnableEncoder, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    """Put the reader of late interaction behind an encoder."""
    recipe, checkpoint = source.recipe, source.checkpoint
    projection = (
        read_projections(checkpoint, recipe.projections, of_tokens=True)
        if recipe.projections
        else read_inline_linear(checkpoint)
    ).to(placement.device)
    ids = (source.tokenizer.token_id(word) for word in recipe.late.skipped)
    skipped = frozenset(id_ for id_ in ids if id_ is not None)
    reader = LateReader(projection, drop_first=False, skipped=skipped, scaled=recipe.late.scaled)
    return encoder.opened({Output.MULTIVECTOR: reader})


def open_sparse(
    encoder: RunnableEncoder, head: nn.Module, vocabulary: int, source: NetworkSource, placement: Placement
) -> OpenedNetwork:
    """Put the reader of SPLADE's terms behind an encoder.

    head: computes logits (tokens, vocabulary) of (tokens, dim).
    """
    dtype = torch.float32 if placement.dtype == torch.int8 else placement.dtype
    replace_linears(head, placement.linear_type(dtype), dtype)
    splade = source.recipe.splade
    opened = encoder.opened({Output.SPARSE: SpladeReader(head, vocabulary, splade)})
    tables = {
        route: read_terms(source.checkpoint, folder, vocabulary, source.tokenizer.token_id)
        for route, folder in source.recipe.tables.items()
    }
    return opened._replace(head=TableHead(opened.head, tables, splade.terms_max)) if tables else opened


def reads_type_ids(types: int | None) -> bool:
    """Return True if type ids change what a network computes.

    types: its `type_vocab_size`. A network without the key looks type ids up among its words; one with a
    single type adds the same vector to every token.
    """
    return types is None or types > 1


def padding_id(config: Any) -> int:
    """Return the id that fills up shorter texts, 0 where the network has no vector for it."""
    pad_id, words = config.pad_token_id or 0, getattr(config, "vocab_size", None)
    return pad_id if pad_id >= 0 and (not isinstance(words, int) or pad_id < words) else 0


def _special_ids(tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids that stand for no word: a text's ends, padding and the unknown token."""
    names = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")
    ids = (tokenizer.token_id(name) for name in names)
    return frozenset(id_ for id_ in ids if id_ is not None)
