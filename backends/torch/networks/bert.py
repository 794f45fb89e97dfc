"""BERT, RoBERTa and their twins, read from a checkpoint's files without transformers.

To import transformers and its network takes 3 s of processor time, twice as long as torch. The networks here
have the names of its tensors, are proven by the same rules, and give the same numbers to the bit. A file that
they do not hold exactly is left to transformers, whose load gives the refusal.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from backends.recipe.bert_config import BertConfig, read_bert
from backends.recipe.files import Json
from backends.recipe.recipe import ModelKind
from backends.torch.networks.attention import AttentionOptions
from backends.torch.networks.formats import WeightFormats, copy_from_files, set_formats
from backends.torch.networks.fused_layers import FusedEncoder, FusedLayer, normalize
from backends.torch.networks.heads import Classifier, InputBuilder
from backends.torch.networks.opening import (
    NetworkSource,
    OpenedNetwork,
    Placement,
    RunnableEncoder,
    finish_packed,
    open_dense,
    open_multivector,
    open_sparse,
    padding_id,
    reads_type_ids,
    recording,
)
from backends.torch.networks.packing import PackedEncoder, padding_position
from backends.torch.networks.weight_files import (
    TensorDifferences,
    describe_faults,
    first_infinite,
    network_files,
    read_file,
    stored_formats,
)

State: TypeAlias = dict[str, Tensor]

# Kinds of which the networks here have the heads.
KINDS: frozenset[ModelKind] = frozenset({"dense", "multivector", "sparse", "classifier"})
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}
# Names of a norm's tensors in files of TensorFlow's time.
LEGACY_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def _tree(**parts: nn.Module) -> Any:
    """Return a module without code of its own."""
    tree = nn.Module()
    for name, part in parts.items():
        tree.add_module(name, part)
    return tree


def _table(rows: int, config: BertConfig) -> nn.Embedding:
    # Given a weight, torch draws no random numbers, for which it would import its compiler.
    weight = torch.empty(rows, config.hidden_size, device="meta")
    return nn.Embedding(rows, config.hidden_size, _weight=weight)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, device="meta")


def _norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, device="meta")


def _layer(config: BertConfig) -> Any:
    """Return the parts of a layer, as `FusedLayer` takes them."""
    width, inner = config.hidden_size, config.intermediate_size
    products = {name: _linear(width, width) for name in ("query", "key", "value")}
    attention = _tree(
        self=_tree(**products), output=_tree(dense=_linear(width, width), LayerNorm=_norm(config))
    )
    attention.get_submodule("self").num_attention_heads = config.num_attention_heads
    return _tree(
        attention=attention,
        intermediate=_tree(dense=_linear(width, inner), intermediate_act_fn=ACTIVATIONS[config.hidden_act]()),
        output=_tree(dense=_linear(inner, width), LayerNorm=_norm(config)),
    )


class BertEmbeddings(nn.Module):
    """Sum of the vectors of a token, its type and its position, and a norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = _table(config.vocab_size, config)
        self.position_embeddings = _table(config.max_position_embeddings, config)
        self.token_type_embeddings = _table(config.type_vocab_size, config)
        self.LayerNorm = _norm(config)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor) -> Tensor:
        """Compute (1, tokens, dim) float32. token_type_ids: None if all are of the first type."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        vectors = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        return normalize(self.LayerNorm, vectors + self.position_embeddings(position_ids))


class Pooler(nn.Module):
    """Layer for classifiers behind the first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = _linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute (rows, dim) of (rows, longest, dim)."""
        return self.dense(hidden[:, 0]).tanh()


class Bert(nn.Module):
    """Encoder with the tensors of transformers' `BertModel`; `packed` makes what runs of it."""

    def __init__(self, config: BertConfig, *, has_pooler: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = _tree(layer=nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers)))
        self.pooler = Pooler(config) if has_pooler else None

    @torch.inference_mode()
    def packed(self) -> PackedEncoder:
        """Return the encoder without padding, whose layers take the place of this one's."""
        layers = self.encoder.layer
        scale = (self.config.hidden_size // self.config.num_attention_heads) ** -0.5
        for place in range(len(layers)):
            # One at a time: a layer exists twice while it is fused.
            layers[place] = FusedLayer(layers[place], AttentionOptions(scale))
        encoder: Any = FusedEncoder(self.embeddings, layers)
        encoder.config, encoder.pooler = self.config, self.pooler
        return PackedEncoder(encoder, padding_position(self.config))


class Logits(msgspec.Struct, frozen=True):
    """Output of a classifier: (rows, labels)."""

    logits: Tensor


class BertClassifier(nn.Module):
    """Classifier on the pooler of BERT."""

    def __init__(self, config: BertConfig, labels: int) -> None:
        super().__init__()
        self.bert: nn.Module = Bert(config, has_pooler=True)
        self.classifier = _linear(config.hidden_size, labels)

    def forward(self, **inputs: Tensor) -> Logits:
        """Compute the logits of (rows, longest) inputs."""
        return Logits(self.classifier(self.bert(**inputs).pooler_output))


class RobertaClassifier(nn.Module):
    """Classifier on the first token of RoBERTa."""

    def __init__(self, config: BertConfig, labels: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.roberta: nn.Module = Bert(config)
        self.classifier = _tree(dense=_linear(width, width), out_proj=_linear(width, labels))

    def forward(self, **inputs: Tensor) -> Logits:
        """Compute the logits of (rows, longest) inputs."""
        first = self.roberta(**inputs).last_hidden_state[:, 0]
        return Logits(self.classifier.out_proj(self.classifier.dense(first).tanh()))


class WordHead(nn.Module):
    """Logits of the vocabulary for token vectors."""

    def __init__(self, dense: nn.Linear, activation: nn.Module, norm: nn.LayerNorm, words: nn.Linear) -> None:
        super().__init__()
        self.dense: nn.Module = dense
        self.activation = activation
        self.norm = norm
        self.words: nn.Module = words

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute (tokens, vocabulary) of (tokens, dim), any float dtype."""
        # The layer before the norm may return half precision, which a GPU rejects with float32 weights.
        return self.words(normalize(self.norm, self.activation(self.dense(hidden)).float()))


class BertWords(nn.Module):
    """Masked language model, whose last layer has the weights of the embeddings."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dense, norm = _linear(config.hidden_size, config.hidden_size), _norm(config)
        self.add_module(config.prefix, Bert(config))
        if config.model_type == "bert":
            self.cls = _tree(predictions=_tree(transform=_tree(dense=dense, LayerNorm=norm)))
            self.cls.predictions.bias = nn.Parameter(torch.empty(config.vocab_size, device="meta"))
        else:
            self.lm_head = _tree(dense=dense, layer_norm=norm)
            self.lm_head.bias = nn.Parameter(torch.empty(config.vocab_size, device="meta"))

    def head(self, config: BertConfig) -> WordHead:
        """Return the layers behind the encoder."""
        words = nn.Linear(config.hidden_size, config.vocab_size, device="meta")
        encoder: Any = self.get_submodule(config.prefix)
        words.weight = encoder.embeddings.word_embeddings.weight
        if config.model_type == "bert":
            transform = self.cls.predictions.transform
            words.bias = self.cls.predictions.bias
            return WordHead(transform.dense, ACTIVATIONS[config.hidden_act](), transform.LayerNorm, words)
        words.bias = self.lm_head.bias
        return WordHead(self.lm_head.dense, nn.GELU(), self.lm_head.layer_norm, words)


# Ends of the names of tensors that share the embeddings or the head's bias, where a file repeats them.
TIED_WORDS = ("decoder.weight", "decoder.bias")


def open_bert(source: NetworkSource, placement: Placement, config: Json) -> OpenedNetwork | None:
    """Open a network of this module, None where transformers is to open it.

    config: content of config.json. Raises: ModelUnavailable if a file of weights is damaged.
    """
    found, recipe = read_bert(config), source.recipe
    needs_stock = source.code or source.adapter or recipe.layer_weights is not None
    if found is None or needs_stock or recipe.kind not in KINDS:
        return None
    # Layers of 8 bits are made of transformers' encoder, and the other runtime is converted from it.
    if placement.dtype == torch.int8 or placement.runtime != "torch":
        return None
    network: Any = _built(found, recipe.kind, len(recipe.labels))
    stored = _fill(network, found, source, placement)
    if stored is None:
        return None
    network.eval().to(placement.device)
    opened = OPENERS[recipe.kind](network, found, source, placement)
    copy_from_files((network,), stored)
    return opened


def _built(config: BertConfig, kind: ModelKind, labels: int) -> nn.Module:
    if kind == "classifier":
        classifier = BertClassifier if config.model_type == "bert" else RobertaClassifier
        return classifier(config, labels)
    return BertWords(config) if kind == "sparse" else Bert(config)


def _fill(
    network: nn.Module, config: BertConfig, source: NetworkSource, placement: Placement
) -> frozenset[torch.dtype] | None:
    """Put a checkpoint's weights into an empty network; return the number formats of its files.

    None, with the network in an undefined state, if they are not exactly those of the network.
    Raises: ModelUnavailable if a file is damaged.
    """
    files = network_files(source.checkpoint)
    stored = stored_formats(files)
    state = {name: tensor for file in files for name, tensor in read_file(file).items()}
    named = _renamed(state, config.prefix, is_inner=isinstance(network, Bert))
    if named is None or (isinstance(network, BertWords) and not _is_tied(named, config.prefix)):
        return None
    encoder: Any = network if isinstance(network, Bert) else network.get_submodule(config.prefix)
    formats = WeightFormats.of(placement.dtype, stored, source.recipe.kind)
    set_formats(encoder, encoder.embeddings.word_embeddings, formats)
    own = network.state_dict()
    shapes = [
        (name, named[name].shape, weight.shape)
        for name, weight in own.items()
        if name in named and named[name].shape != weight.shape
    ]
    parts = [name for name, _ in network.named_children()]
    differences = TensorDifferences(parts, own.keys() - named.keys(), named.keys() - own.keys(), shapes)
    if describe_faults(differences, source.recipe.kind, config.prefix):
        return None
    weights = {name: named[name].to(weight.dtype) for name, weight in own.items()}
    network.load_state_dict(weights, assign=True)
    network.requires_grad_(requires_grad=False)
    return None if first_infinite(network) else stored


def _renamed(state: State, prefix: str, *, is_inner: bool) -> State | None:
    """Return tensors under the names of a network, None if two would have the same.

    is_inner: True for an encoder alone, which has no prefix.
    """
    named: State = {}
    for name, tensor in state.items():
        new = name
        for old, current in LEGACY_NAMES.items():
            new = new.replace(old, current)
        if is_inner:
            new = new.removeprefix(f"{prefix}.")
        if new in named:
            return None
        named[new] = tensor
    return named


def _is_tied(named: State, prefix: str) -> bool:
    """Remove the repeated tensors of a language model's head; return False if they differ from the others."""
    words = named.get(f"{prefix}.embeddings.word_embeddings.weight")
    for name in [name for name in named if name.endswith(TIED_WORDS)]:
        shared = words if name.endswith("weight") else named.get(f"{name.removesuffix('decoder.bias')}bias")
        if shared is None or not torch.equal(named.pop(name), shared):
            return False
    return True


def _runnable(network: Bert, source: NetworkSource, placement: Placement) -> RunnableEncoder:
    config, packed = network.config, network.packed()
    finish_packed(packed, placement)
    inputs = _inputs(config, source, torch.device("cpu"), passes_tokens=True)
    return RunnableEncoder(packed, inputs, recording(packed, inputs, placement))


def _inputs(
    config: BertConfig, source: NetworkSource, device: torch.device, *, passes_tokens: bool
) -> InputBuilder:
    has_type_ids = source.tokenizer.traits.type_ids.given and reads_type_ids(config.type_vocab_size)
    return InputBuilder(device, padding_id(config), has_type_ids=has_type_ids, passes_tokens=passes_tokens)


def _open_sparse(
    network: BertWords, config: BertConfig, source: NetworkSource, placement: Placement
) -> OpenedNetwork:
    encoder: Any = network.get_submodule(config.prefix)
    return open_sparse(
        _runnable(encoder, source, placement), network.head(config), config.vocab_size, source, placement
    )


def _open_classifier(
    network: Any, config: BertConfig, source: NetworkSource, placement: Placement
) -> OpenedNetwork:
    packed = network.get_submodule(config.prefix).packed()
    finish_packed(packed, placement)
    inputs = _inputs(config, source, placement.device, passes_tokens=False)
    setattr(network, config.prefix, packed)
    choose = recording(packed, inputs, placement)
    return OpenedNetwork(Classifier(network, inputs), packed=True, outputs=frozenset(), choose=choose)


OPENERS: Mapping[ModelKind, Callable[[Any, BertConfig, NetworkSource, Placement], OpenedNetwork]] = {
    "dense": lambda network, _, source, placement: open_dense(
        _runnable(network, source, placement), source, placement
    ),
    "multivector": lambda network, _, source, placement: open_multivector(
        _runnable(network, source, placement), source, placement
    ),
    "sparse": _open_sparse,
    "classifier": _open_classifier,
}
