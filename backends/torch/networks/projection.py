"""Projection of pooled vectors, or of token vectors, with a checkpoint's own layers.

(rows, dim) float32 → (rows, out) float32. Source: sentence-transformers 6, `Dense`, `LayerNorm`,
`Normalize` and `WeightedLayerPooling`; the weights that ColBERT and BGE-M3 keep outside of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from backends.checkpoints.needed_files import has_weights
from backends.checkpoints.small_files import read_json_object
from backends.contract import Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.recipe import Projection, ProjectionKind, Recipe
from backends.torch.networks.weight_files import read_file, read_tensor, read_tensors
from backends.torch.refusals import first_line

# Weights of tokens as OpenSearch publishes them.
TERMS_FILE = "idf.json"
Config = TypeVar("Config", bound=msgspec.Struct)

# Packages under which a file may name a class of torch.
TORCH_PACKAGES = frozenset(
    {"torch.nn", "torch.nn.modules", "torch.nn.modules.activation", "torch.nn.modules.linear"}
)
# Classes that change each number by itself. A file can only select torch's own classes from these lists.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        nn.CELU,
        nn.ELU,
        nn.GELU,
        nn.Hardshrink,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.Identity,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.PReLU,
        nn.ReLU,
        nn.ReLU6,
        nn.RReLU,
        nn.SELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softplus,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
    )
}
# Classes that change a whole vector. Without a `dim`, torch takes that of the vector for (batch, dim), and
# that of the batch for (batch, tokens, dim).
ROW_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "LogSoftmax": partial(nn.LogSoftmax, dim=1),
    "Softmax": partial(nn.Softmax, dim=1),
    "Softmin": partial(nn.Softmin, dim=1),
}


class DenseConfig(msgspec.Struct, frozen=True):
    """Content of the module's config.json."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str | None = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None

    @property
    def activation(self) -> str | None:
        """Name of torch's class, None if the config names another one or none."""
        package, _, name = (self.activation_function or "").rpartition(".")
        is_known = package in TORCH_PACKAGES and name in ACTIVATIONS.keys() | ROW_ACTIVATIONS.keys()
        return name if is_known else None


class Dense(nn.Module):
    """Linear layer and activation, with a residual connection if the config asks for it."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        name = config.activation or ""
        self.activation_function: nn.Module = (ACTIVATIONS.get(name) or ROW_ACTIVATIONS[name])()
        self.residual: nn.Module | None = None
        if config.use_residual:
            same_width = config.in_features == config.out_features
            self.residual = (
                nn.Identity()
                if same_width
                else nn.Linear(config.in_features, config.out_features, bias=False)
            )

    def forward(self, vectors: Tensor) -> Tensor:
        """Project (batch, in) to (batch, out)."""
        out: Tensor = self.activation_function(self.linear(vectors))
        return out if self.residual is None else out + self.residual(vectors)


class LayerNormConfig(msgspec.Struct, frozen=True):
    """Content of the config.json of `LayerNorm`."""

    dimension: int


class LayerMixConfig(msgspec.Struct, frozen=True):
    """Content of the config.json of `WeightedLayerPooling`; the embeddings are layer 0."""

    num_hidden_layers: int = 12
    layer_start: int = 4


class LayerMix(nn.Module):
    """Weighted mean of the token vectors of a network's layers."""

    def __init__(self, config: LayerMixConfig) -> None:
        super().__init__()
        self.layer_weights = nn.Parameter(torch.ones(config.num_hidden_layers + 1 - config.layer_start))
        self._first = config.layer_start

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Return (rows, tokens, dim) of the layers' vectors, the embeddings first."""
        mixed = sum(
            (weight * layer for weight, layer in zip(self.layer_weights, layers[self._first :], strict=True)),
            start=torch.zeros((), device=layers[0].device),
        )
        return mixed / self.layer_weights.sum()


class Normalize(nn.Module):
    """Scaling of each row to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Scale (batch, dim); the shape stays."""
        return nn.functional.normalize(vectors, dim=-1)


def check_projections(checkpoint: Path, recipe: Recipe) -> None:
    """Raise ModelUnavailable if the config of a module asks for what the engine does not have."""
    token_projections = recipe.projections if recipe.kind == "multivector" else recipe.token_projections
    pooled = () if recipe.kind == "multivector" else recipe.projections
    for projections, of_tokens in ((token_projections, True), (pooled, False)):
        for projection in projections:
            if projection.kind == "Dense":
                _read_dense_config(checkpoint / projection.folder, of_tokens=of_tokens)
            elif projection.kind == "LayerNorm":
                _read_config(checkpoint / projection.folder, LayerNormConfig)
    if recipe.layer_weights is not None:
        _read_config(checkpoint / recipe.layer_weights, LayerMixConfig)
    for folder in recipe.tables.values():
        _terms_file(checkpoint, folder)


class First(nn.Module):
    """Selection of the first components of each row, as `truncate_dim` of sentence-transformers states."""

    def __init__(self, components: int) -> None:
        super().__init__()
        self._components = components

    def forward(self, vectors: Tensor) -> Tensor:
        """Return (batch, components) of (batch, dim)."""
        return vectors[:, : self._components]


def read_projections(
    checkpoint: Path, projections: Sequence[Projection], *, of_tokens: bool = False
) -> nn.Module:
    """Load the modules with their weights, in order. of_tokens: True if they project each token's vector.

    Raises: ModelUnavailable.
    """
    return nn.Sequential(
        *(
            _load(projection.kind, checkpoint / projection.folder, of_tokens=of_tokens)
            for projection in projections
        )
    ).eval()


def read_sentence_projections(checkpoint: Path, recipe: Recipe) -> nn.Module:
    """Load what turns a pooled vector into that of its text. Raises: ModelUnavailable."""
    projections = read_projections(checkpoint, recipe.projections)
    return projections if recipe.width_max is None else nn.Sequential(projections, First(recipe.width_max))


def read_layer_mix(folder: Path) -> LayerMix:
    """Load the weights by which the vectors of several layers are averaged. Raises: ModelUnavailable."""
    with _readable("WeightedLayerPooling", folder):
        module = LayerMix(_read_config(folder, LayerMixConfig))
        module.load_state_dict(_floats(folder))
    return module.eval().requires_grad_(requires_grad=False)


def read_linear(path: Path) -> nn.Linear:
    """Load a linear layer from a file that holds its state dict. Raises: ModelUnavailable."""
    return _linear_of(read_file(path), path)


def read_terms(
    checkpoint: Path, folder: str, vocabulary: int, token_id: Callable[[str], int | None]
) -> Vectors:
    """Load the weight of each token of a `SparseStaticEmbedding`: (vocabulary,) float32.

    token_id: returns the id of a token, None for an unknown one. Raises: ModelUnavailable if they do not fit
    the network next to them, or have a tokenizer of their own.
    """
    tokenizers = [checkpoint / "tokenizer.json", checkpoint / folder / "tokenizer.json"]
    if tokenizers[1].is_file() and tokenizers[0].read_bytes() != tokenizers[1].read_bytes():
        raise ModelUnavailable(f"{tokenizers[1]} is not the tokenizer of the network, {tokenizers[0]}")
    file = _terms_file(checkpoint, folder)
    if file is not None:
        return _read_json_terms(file, vocabulary, token_id)
    state = read_tensors(checkpoint / folder)
    weights = state.get("weight")
    if set(state) != {"weight"} or weights is None or weights.shape != (vocabulary,):
        shapes = {name: list(tensor.shape) for name, tensor in state.items()}
        raise ModelUnavailable(f"{checkpoint / folder} holds {shapes}, not a `weight` of {[vocabulary]}")
    found: Vectors = weights.float().numpy()
    return found


def _terms_file(checkpoint: Path, folder: str) -> Path | None:
    """Return the JSON file with the weights of a `SparseStaticEmbedding`, None if it has tensors.

    Raises: ModelUnavailable if it has neither.
    """
    if has_weights(checkpoint / folder):
        return None
    stated = str(read_json_object(checkpoint / folder / "config.json").get("path") or TERMS_FILE)
    # sentence-transformers looks for it where it is started.
    places = [checkpoint / folder / PurePath(stated).name, checkpoint / PurePath(stated).name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ModelUnavailable(
            f"{checkpoint / folder} is a SparseStaticEmbedding, a table of token weights, without them: put "
            f"model.safetensors or {PurePath(stated).name} into the folder"
        )
    return found


def _read_json_terms(file: Path, vocabulary: int, token_id: Callable[[str], int | None]) -> Vectors:
    stated = read_json_object(file)
    found: Vectors = np.zeros(vocabulary, dtype=np.float32)
    for token, weight in stated.items():
        place = token_id(token)
        if place is None or place >= vocabulary or not isinstance(weight, int | float):
            raise ModelUnavailable(
                f"{file} has the weight {weight!r} of the token {token!r}, which is no number, or of no "
                "token of the vocabulary"
            )
        found[place] = weight
    return found


def read_inline_linear(checkpoint: Path) -> nn.Linear:
    """Load ColBERT's projection, `linear.weight` among the network's weights. Raises: ModelUnavailable."""
    weight = read_tensor(checkpoint, "linear.weight")
    if weight is None:
        raise ModelUnavailable(f"{checkpoint} has no weight `linear.weight`, ColBERT's projection")
    return _linear_of({"weight": weight}, checkpoint)


def _linear_of(state: dict[str, Tensor], source: Path) -> nn.Linear:
    try:
        rows, columns = state["weight"].shape
        layer = nn.Linear(columns, rows, bias="bias" in state)
        layer.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    except (RuntimeError, KeyError, ValueError) as error:
        raise ModelUnavailable(
            f"the weights in {source} are no linear layer: {first_line(error)}; they hold "
            f"{', '.join(sorted(state)[:3])}"
        ) from error
    return layer.eval()


def _load(kind: ProjectionKind, folder: Path, *, of_tokens: bool) -> nn.Module:
    if kind == "Normalize":
        return Normalize()
    if kind == "LayerNorm":
        return _load_layer_norm(folder)
    return _load_dense(folder, of_tokens=of_tokens)


def _load_layer_norm(folder: Path) -> nn.LayerNorm:
    with _readable("LayerNorm", folder):
        module = nn.LayerNorm(_read_config(folder, LayerNormConfig).dimension)
        state = {name.removeprefix("norm."): tensor for name, tensor in _floats(folder).items()}
        module.load_state_dict(state)
    return module


def _load_dense(folder: Path, *, of_tokens: bool) -> Dense:
    config = _read_dense_config(folder, of_tokens=of_tokens)
    with _readable("Dense", folder):
        module = Dense(config)
        module.load_state_dict(_floats(folder))
    return module


def _read_dense_config(folder: Path, *, of_tokens: bool) -> DenseConfig:
    config = _read_config(folder, DenseConfig)
    # Without such a name, the kind of the model decides between sentence and token vectors.
    if not of_tokens and config.module_input_name != "sentence_embedding":
        raise ModelUnavailable(f"{folder} projects {config.module_input_name}, not the pooled vector")
    if config.module_output_name not in {None, config.module_input_name}:
        raise ModelUnavailable(f"{folder} writes {config.module_output_name}, which nothing else reads")
    if config.activation is None:
        raise ModelUnavailable(
            f"{folder} asks for the activation {config.activation_function}; known are, below torch.nn: "
            f"{', '.join(sorted({*ACTIVATIONS, *ROW_ACTIVATIONS}))}"
        )
    if of_tokens and config.activation in ROW_ACTIVATIONS:
        raise ModelUnavailable(
            f"{folder} applies {config.activation} to token vectors, which scales each by its neighbors "
            "in the batch"
        )
    return config


def _read_config(folder: Path, kind: type[Config]) -> Config:
    with _readable(kind.__name__.removesuffix("Config"), folder):
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=kind)


def _floats(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in read_tensors(folder).items()}


@contextmanager
def _readable(kind: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, msgspec.DecodeError) as error:
        raise ModelUnavailable(f"the {kind} module in {folder} could not be read: {error}") from error
