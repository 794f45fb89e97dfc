"""Recipe of a checkpoint: kind, pooling, prompts, length, labels and all else that turns texts into outputs.

Pure data. `checkpoint` reads it from files; everything that computes takes it from here.
"""

from typing import Literal, TypeAlias

import msgspec

# dense: token vectors are pooled. sparse: a masked language model's weights for terms. multivector: a vector
# per token. classifier: a sequence classifier; with one label it reranks. language: a causal language model
# whose next word scores a pair. static: a table of token vectors; a text's vector is their mean. dual: an
# encoder of texts next to one of pictures or recordings, with vectors in one space. pages: a vector per token
# of a query, and per patch of a page's picture.
ModelKind: TypeAlias = Literal[
    "dense", "sparse", "multivector", "classifier", "language", "static", "dual", "pages"
]
# Files of BGE-M3's weights, next to its dense model.
LEXICAL_FILE = "sparse_linear.pt"
COLBERT_FILE = "colbert_linear.pt"
ProjectionKind: TypeAlias = Literal["Dense", "LayerNorm", "Normalize"]
PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class Projection(msgspec.Struct, frozen=True):
    """Module of sentence-transformers that changes vectors: a layer, or scaling to length 1."""

    kind: ProjectionKind
    folder: str = ""


class Splade(msgspec.Struct, frozen=True):
    """Conversion of a masked language model's logits to term weights: log(1 + relu), once or twice.

    terms_max: the number of the largest weights of a text that stay, None for all.
    """

    strategy: Literal["max", "sum"] = "max"
    twice: bool = False
    terms_max: int | None = None


class QueryExpansion(msgspec.Struct, frozen=True):
    """Padding of queries shorter than `length` tokens; the vector of each filler token counts.

    cuts: True if longer queries are cut to `length`. attended: True if other tokens attend to the fillers.
    tokens: the filler, the first of them that the vocabulary has. is_stated: the checkpoint names the first,
    which the vocabulary then has to have.
    """

    length: int
    cuts: bool = True
    attended: bool = False
    tokens: tuple[str, ...] = ()
    is_stated: bool = True


class LateInteraction(msgspec.Struct, frozen=True):
    """Preparation of queries and documents for late interaction; None is no limit but the network's own.

    prompts: text put before an input of each role. markers: prompts that are one token. skipped: words of
    documents that get no vector. scaled: True if each vector has length 1.
    """

    query_tokens: int | None = None
    document_tokens: int | None = None
    expansion: QueryExpansion | None = None
    prompts: dict[str, str] = {}
    markers: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    scaled: bool = True

    def lengths(self, max_tokens: int) -> tuple[int, int]:
        """Return the most tokens of a query and of a document, without fillers.

        max_tokens: the limit of the network.
        """
        expansion = self.expansion
        query = expansion.length if expansion is not None and expansion.cuts else self.query_tokens
        return min(query or max_tokens, max_tokens), min(self.document_tokens or max_tokens, max_tokens)


class QueryForm(msgspec.Struct, frozen=True):
    """Text before a query, and the tokens behind it, which no truncation removes."""

    prefix: str
    suffix: str


class ChatTemplate(msgspec.Struct, frozen=True):
    """Chat template of a checkpoint, in Jinja's language. special_tokens: name → text, as its variables."""

    source: str
    special_tokens: dict[str, str] = {}


class Recipe(msgspec.Struct, frozen=True):
    """Steps that turn texts into vectors, weights or scores with one checkpoint.

    projections: modules after pooling, in order; the last scaling is left to the caller's `normalize`. For
    multivector they are applied to each token.
    width_max: the first components of a dense vector that stay, None for all. norm_before_cut: a vector
    passes a layer norm without weights before a request's `dimensions` cut it.
    token_projections: `Dense` modules before pooling, applied to each token. layer_weights: folder of the
    weights by which the vectors of several layers are averaged, None for the vectors of the last layer.
    prompts: name → text that is put before an input.
    include_prompt: True if the prompt's tokens take part in pooling.
    tables: route of inputs whose terms are looked up → folder of their weights. network_route: route of the
    network, None for a model without routes. default_route: of inputs without a role, None if they need one.
    lexical, colbert: True if BGE-M3's weights for terms and for token vectors lie next to a dense model.
    chat: the template of conversations, None if the checkpoint has none.
    padding: of each text of a dual encoder, None if none is padded. medium: what the network reads next to
    texts. query: text around each query of pages, None for other kinds.
    """

    kind: ModelKind
    model_type: str
    max_tokens: int
    pooling: tuple[PoolingMode, ...] = ("mean",)
    projections: tuple[Projection, ...] = ()
    width_max: int | None = None
    norm_before_cut: bool = False
    token_projections: tuple[Projection, ...] = ()
    layer_weights: str | None = None
    include_prompt: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    splade: Splade = Splade()
    tables: dict[str, str] = {}
    network_route: str | None = None
    default_route: str | None = None
    late: LateInteraction = LateInteraction()
    lexical: bool = False
    colbert: bool = False
    chat: ChatTemplate | None = None
    padding: QueryExpansion | None = None
    medium: Literal["image", "audio"] | None = None
    query: QueryForm | None = None


def takes_late_chunking(recipe: Recipe) -> bool:
    """Return whether the parts of one text can be pooled apart: only a mean needs no other token."""
    return recipe.kind == "dense" and recipe.pooling == ("mean",) and recipe.network_route is None


class InputRules(msgspec.Struct, frozen=True):
    """Preparation of inputs that every server of a checkpoint applies: its length limit and its prompts."""

    max_tokens: int
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
