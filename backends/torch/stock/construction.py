"""Construction of a network of transformers and its readers, one function per kind of model."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from backends.contract import Output
from backends.contract.errors import ModelUnavailable
from backends.recipe.recipe import ModelKind
from backends.torch.inputs.pairs import answer_ids
from backends.torch.networks.formats import copy_from_files
from backends.torch.networks.heads import Classifier, InputBuilder
from backends.torch.networks.int8 import ProbeTexts, gain, probe_kernel, quantize
from backends.torch.networks.opening import (
    Choose,
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
from backends.torch.networks.openvino_passes import OpenVinoPasses, convert
from backends.torch.networks.packing import PackedEncoder, padding_position
from backends.torch.networks.precision import Autocast
from backends.torch.networks.projection import (
    LayerMix,
    read_layer_mix,
)
from backends.torch.networks.readers import (
    LastWordReader,
    NextTokenReader,
    PooledReader,
    Reader,
)
from backends.torch.refusals import refuse_on_error
from backends.torch.stock.fusing import fuse, shorten
from backends.torch.stock.language import LanguageHead
from backends.torch.stock.llama_bidirectional import (
    LlamaBidirectionalForSequenceClassification,
    pooled_head,
    register,
)
from backends.torch.stock.packing import pack
from backends.torch.stock.rows import SingleRows, attend_to_all_tokens, needs_single_rows, varies_by_length
from backends.torch.stock.towers import DualHead, PageHead
from backends.torch.stock.weights import OwnNetwork, load_network, prove_own_network

# Package into which transformers puts code that comes with a checkpoint.
REMOTE_CODE_PACKAGE = "transformers_modules"
# Types of models that keep state of a pass, as those do whose output depends on the longest text.
STATEFUL_TYPES = frozenset({"recurrent_gemma"})
# Types of models whose code calls the pooler without asking whether there is one.
CALLED_POOLERS = frozenset({"squeezebert"})

PADDED = "`runtime: openvino` has no effect: the network computes padding"

register()

Readers: TypeAlias = Mapping[Output, Reader]


def open_stock(source: NetworkSource, placement: Placement) -> OpenedNetwork:
    """Load a network of transformers, or of a checkpoint's own code, with its readers.

    Raises: ModelUnavailable.
    """
    model, stored = load_network(source, placement)
    model.to(placement.device)
    # A head for language removes the encoder from its model.
    encoder = getattr(model, model.base_model_prefix, model)
    reentrant = _is_reentrant(model)
    opened = open_model(model, source, placement)
    if placement.dtype == torch.int8:
        probe = ProbeTexts.of(source.tokenizer, source.template, opened.outputs)
        with refuse_on_error(f"{source.checkpoint} cannot be served with `dtype: int8`"):
            cosine = quantize(encoder, opened.head, probe)
        note = f"int8: least cosine to float32 on the probe texts {cosine:.4f}, {gain(probe_kernel())}"
        opened = opened._replace(notes=(note,))
    copy_from_files((model, encoder), stored)
    return opened._replace(reentrant=reentrant)


def open_model(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    """Put the readers of its kind behind a network on its device. Raises: ModelUnavailable."""
    with refuse_on_error(f"{source.checkpoint} has a {type(model).__name__} that the engine cannot run"):
        if source.code is not None:
            model = OwnNetwork(model, "logits" if source.recipe.kind == "classifier" else "last_hidden_state")
            prove_own_network(model)
        if not hasattr(model.config, "pad_token_id"):
            model.config.pad_token_id = None
        attend_to_all_tokens(model)
        return OPENERS[source.recipe.kind](model, source, placement)


def _open_dense(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    _drop_pooler(model)
    if source.recipe.layer_weights is not None:
        mix = read_layer_mix(source.checkpoint / source.recipe.layer_weights)
        _mix_layers(model, mix.to(placement.device))
    return open_dense(_encoder(model, source, placement), source, placement)


def _drop_pooler(model: Any) -> None:
    """Remove the layer for classifiers: vectors are pooled from token vectors."""
    if getattr(model, "pooler", None) is not None and model.config.model_type not in CALLED_POOLERS:
        model.pooler = None


def _open_multivector(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    _drop_pooler(model)
    return open_multivector(_encoder(model, source, placement), source, placement)


def _open_sparse(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    head = LanguageHead(model)
    encoder = _encoder(head.take_encoder(), source, placement)
    return open_sparse(encoder, head, model.config.vocab_size, source, placement)


def _open_language(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    # Its last layer stays in float32: a score is the small difference of two logits.
    head = LanguageHead(model)
    answers = answer_ids(source.tokenizer, source.template)
    opened = _encoder(head.take_encoder(), source, placement).opened(
        {Output.DENSE: NextTokenReader(head, *answers)}
    )
    return opened._replace(outputs=frozenset())


def _open_classifier(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    """Open the stock classifier, around an encoder without padding if its architecture supports that."""
    if source.code is not None:
        return _padded_classifier(model, source, placement)
    prefix = model.base_model_prefix
    if isinstance(model, GenericForSequenceClassification):
        opened = _encoder(getattr(model, prefix), source, placement).opened(
            {Output.DENSE: _classifier_reader(model)}
        )
        return opened._replace(outputs=frozenset())
    packed, choose = _packed(getattr(model, prefix), placement)
    if packed is None:
        return _padded_classifier(model, source, placement)._replace(choose=choose)
    # Layers behind the encoder may read the inputs too.
    inputs = _input_builder(model, source, placement.device)
    choose = choose or recording(packed, inputs, placement)
    setattr(model, prefix, packed)
    return OpenedNetwork(Classifier(model, inputs), packed=True, outputs=frozenset(), choose=choose)


def _classifier_reader(model: Any) -> Reader:
    pooling, score = pooled_head(model)
    pad_id = model.config.get_text_config().pad_token_id
    if isinstance(model, LlamaBidirectionalForSequenceClassification) or pad_id is None:
        return PooledReader((pooling,), score)
    return LastWordReader(score, pad_id)


def _padded_classifier(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    inputs = _input_builder(model, source, placement.device)
    classifier = Classifier(_padded(model, placement, source.recipe.max_tokens), inputs)
    return OpenedNetwork(classifier, packed=False, outputs=frozenset())


def _padded(network: Any, placement: Placement, max_tokens: int) -> nn.Module:
    """Return a network that computes padding, or one text at a time if padding changes its output."""
    is_single = not isinstance(network, OwnNetwork) and needs_single_rows(network, max_tokens)
    autocast = Autocast(network, placement.dtype)
    return SingleRows(autocast) if is_single else autocast


def _open_dual(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    del source
    _refuse_compiled(model, placement)
    pad_id = model.config.text_config.pad_token_id or 0
    inputs = InputBuilder(placement.device, pad_id, has_type_ids=False)
    head = DualHead(model, inputs, placement.device, placement.dtype)
    return OpenedNetwork(head, packed=False, outputs=frozenset({Output.DENSE}))


def _open_pages(model: Any, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    del source
    _refuse_compiled(model, placement)
    head = PageHead(model, placement.device, placement.dtype)
    return OpenedNetwork(head, packed=False, outputs=frozenset({Output.MULTIVECTOR}))


OPENERS: dict[ModelKind, Callable[[Any, NetworkSource, Placement], OpenedNetwork]] = {
    "dense": _open_dense,
    "sparse": _open_sparse,
    "multivector": _open_multivector,
    "classifier": _open_classifier,
    "language": _open_language,
    "dual": _open_dual,
    "pages": _open_pages,
}


def _mix_layers(model: Any, mix: LayerMix) -> None:
    """Have a network return the weighted mean of its layers as its last hidden state."""

    def replace_last(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        outputs["last_hidden_state"] = mix(outputs.hidden_states)
        return outputs

    model.register_forward_hook(replace_last)


def _encoder(network: Any, source: NetworkSource, placement: Placement) -> RunnableEncoder:
    packed, choose = _packed(network, placement)
    runnable = packed or _padded(network, placement, source.recipe.max_tokens)
    is_padded = isinstance(runnable, Autocast)
    # A packed encoder finds its layout on the host, and copies only the tokens to a GPU.
    device = placement.device if packed is None else torch.device("cpu")
    inputs = _input_builder(network, source, device, passes_tokens=not is_padded)
    if packed is not None:
        choose = choose or recording(packed, inputs, placement)
    return RunnableEncoder(runnable, inputs, choose)


def _packed(encoder: Any, placement: Placement) -> tuple[PackedEncoder | None, Choose | None]:
    """Return the encoder without padding, and what chooses its runtime.

    Both are None where they do not apply: to an architecture that needs padding, and to PyTorch alone.
    """
    if isinstance(encoder, OwnNetwork) or varies_by_length(encoder):
        _refuse_compiled(encoder, placement)
        return None, _chooser(None, PADDED, placement)
    lone = None if placement.runtime == "torch" else convert(encoder, placement.dtype)
    config = encoder.config
    packed = pack(encoder, padding_position(config))
    if packed is None:
        _refuse_compiled(encoder, placement)
        return None, _chooser(None, PADDED, placement)
    if not config.output_hidden_states:
        # transformers collects the vectors of each layer by the layer's class.
        fuse(packed.encoder)
    # Layers of 8 bits are made after a pass in float32, and put hooks on transformers' encoder.
    if placement.dtype != torch.int8:
        packed.encoder = shorten(packed.encoder)
        finish_packed(packed, placement)
    return packed, _chooser(packed, lone, placement)


def _chooser(
    packed: PackedEncoder | None, lone: OpenVinoPasses | str | None, placement: Placement
) -> Choose | None:
    """Return what chooses the runtime by measuring. lone: the other runtime, or why there is none."""
    if placement.runtime == "torch" or lone is None:
        return None
    if packed is None or isinstance(lone, str):
        note = str(lone)
        return lambda: note
    packed.lone = lone
    return partial(lone.choose, packed)


def _refuse_compiled(encoder: Any, placement: Placement) -> None:
    if placement.compiled:
        raise ModelUnavailable(f"`compile` does not serve models of type {encoder.config.model_type}")


def _is_reentrant(model: Any) -> bool:
    """Return True if no pass changes the model's state; code that comes with weights may do anything."""
    if model.config.model_type in STATEFUL_TYPES or varies_by_length(model):
        return False
    return not any(type(module).__module__.startswith(REMOTE_CODE_PACKAGE) for module in model.modules())


def _input_builder(
    model: Any, source: NetworkSource, device: torch.device, *, passes_tokens: bool = False
) -> InputBuilder:
    """Return a builder of what the tokenizer gives and the network takes."""
    names = inspect.signature(getattr(model, "own", model).forward).parameters
    has_type_ids = (
        source.tokenizer.traits.type_ids.given
        and "token_type_ids" in names
        and reads_type_ids(getattr(model.config, "type_vocab_size", None))
    )
    return InputBuilder(
        device, padding_id(model.config), has_type_ids=has_type_ids, passes_tokens=passes_tokens
    )
