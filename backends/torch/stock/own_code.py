"""Decision whether a checkpoint's network is code of its own, which runs only where its upstream permits it.

A checkpoint names its classes in `auto_map`. transformers silently builds its own class of the same
`model_type` if that code is not trusted, which may be another network. Reads small files only.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from backends.checkpoints.auto_map import ClassReference, read_auto_map
from backends.checkpoints.locations import has_local_code
from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles, Json
from backends.recipe.native_forms import native_form
from backends.recipe.recipe import ModelKind
from backends.torch.networks.opening import OwnCode
from backends.torch.stock.architectures import (
    AUTO_CLASSES,
    ENGINE_CLASSES,
    NATIVE_CLASSES,
    is_decoder,
    native_names,
)

# Kinds whose networks the engine runs as a whole. The others need parts as transformers' classes have them.
RUNNABLE_KINDS: frozenset[ModelKind] = frozenset({"dense", "multivector", "classifier"})

# Sizes of nomic-embed-text under GPT-2's names, which transformers' class of the same name does not read: the
# names that it does read, with its defaults.
NOMIC_SIZES = {
    "n_embd": ("hidden_size", 768),
    "n_head": ("num_attention_heads", 12),
    "n_layer": ("num_hidden_layers", 12),
    "n_inner": ("intermediate_size", 3072),
}
# Switches of its own code that transformers' class does not read: the values that this class implements.
NOMIC_VALUES: dict[str, Any] = {"activation_function": "swiglu", "rotary_emb_fraction": 1.0}
# The same, where absence means the value as well. v2-moe has another base and experts.
NOMIC_DEFAULTS: dict[str, Any] = {
    "rotary_emb_base": 1000,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "layer_norm_epsilon": 1e-12,
    "causal": False,
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "num_experts": 0,
}
# Those that transformers' class reads under other names.
NOMIC_READ = frozenset({"rotary_emb_base", "layer_norm_epsilon", "activation_function", "num_experts"})


Difference: TypeAlias = Callable[[Json, ModelKind], str | None]


def find_own_code(files: CheckpointFiles, kind: ModelKind) -> OwnCode | None:
    """Return the code that a checkpoint's network needs, None if transformers implements the network.

    Raises: ModelUnavailable if code alone cannot serve it.
    """
    references = read_auto_map(files.config)
    if native_form(files.config) is not None or _difference(files.config, kind, references) is None:
        return None
    wanted = references.get(AUTO_CLASSES[kind])
    if wanted is None:
        raise ModelUnavailable(
            f"{files.checkpoint} has code of its own, but none for {AUTO_CLASSES[kind]}, which kind {kind} "
            "needs; set another `task` or `pooling`, or serve it with another backend"
        )
    return OwnCode(wanted, references.get("AutoConfig"))


def require_permission(
    files: CheckpointFiles, kind: ModelKind, *, trusted: bool, code_revision: str | None
) -> OwnCode | None:
    """Return the code to run, None for a network of transformers.

    Raises: ModelUnavailable if the operator did not permit or pin it, or the engine cannot run it.
    """
    _require_native_tokenizer(files)
    code = find_own_code(files, kind)
    if code is None:
        _refuse_unread_switches(files)
        return None
    reason = _difference(files.config, kind, read_auto_map(files.config))
    needs = f"{files.checkpoint} needs code of its own, {code.model.label}: {reason}"
    if kind not in RUNNABLE_KINDS:
        raise ModelUnavailable(f"{needs}. The built-in engine runs no such code for models of kind {kind}")
    _require_one_repository(code, files)
    is_local = has_local_code(files.checkpoint, code.classes)
    pin = f", and `code_revision` to a commit of {code.outside[0].repository}" if code.outside else ""
    if not trusted:
        raise ModelUnavailable(
            f"{needs}. If you trust it, set `trust_remote_code: true`{'' if is_local else pin}"
        )
    if code.outside and not is_local and code_revision is None:
        raise ModelUnavailable(
            f"{needs}. Set `code_revision` to the commit of {code.outside[0].repository} that you trust"
        )
    return code


def _difference(config: Json, kind: ModelKind, references: Mapping[str, ClassReference]) -> str | None:
    """Return why transformers' network is not the one that `auto_map` names, None if it is."""
    model_type = str(config.get("model_type", ""))
    wanted = AUTO_CLASSES[kind]
    # If the class that is needed is not named, the others show whose network it is.
    named = [wanted] if wanted in references else [name for name in references if name in NATIVE_CLASSES]
    for auto_class in dict.fromkeys(["AutoConfig", *named]):
        reference = references.get(auto_class)
        native = native_names(auto_class, model_type)
        if reference is not None and reference.name not in native:
            has = f"the `{native[0]}`" if native else "no such class"
            return f"it names `{reference.name}`, and transformers has {has} for `model_type` {model_type!r}"
    own_network = any(name.startswith("AutoModel") for name in references)
    check = DIFFERENCES.get(model_type, _direction_difference)
    return check(config, kind) if own_network else None


def _nomic_difference(config: Json, _: ModelKind) -> str | None:
    sizes = {name: config.get(native, default) for name, (native, default) in NOMIC_SIZES.items()}
    found = {name: config.get(name, value) for name, value in (sizes | NOMIC_DEFAULTS).items()}
    found |= {name: config.get(name) for name in NOMIC_VALUES}
    expected = sizes | NOMIC_DEFAULTS | NOMIC_VALUES
    different = [f"`{name}: {value}`" for name, value in found.items() if value != expected[name]]
    if not different:
        return None
    return f"transformers' class of that name does not implement {', '.join(different)}"


def _refuse_unread_switches(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable for keys of NomicBert's own code that transformers' class does not read."""
    config = files.config
    if config.get("model_type") != "nomic_bert":
        return
    expected = {
        name: value for name, value in (NOMIC_DEFAULTS | NOMIC_VALUES).items() if name not in NOMIC_READ
    }
    stated = {name: config.get(name, value) for name, value in expected.items()}
    unread = [f"`{name}: {value}`" for name, value in stated.items() if value != expected[name]]
    if unread:
        raise ModelUnavailable(
            f"{files.checkpoint} states {', '.join(unread)} in config.json, which transformers' NomicBert "
            "does not read; state it under a name that it reads, such as `rope_parameters`, or leave it out"
        )


def _direction_difference(config: Json, kind: ModelKind) -> str | None:
    """Compare the direction of attention: gte-Qwen2's `Qwen2Model` also attends to the tokens that follow."""
    model_type = str(config.get("model_type", ""))
    # The engine's own classes state their direction.
    if model_type in ENGINE_CLASSES or not is_decoder(model_type):
        return None
    if kind == "language" or "is_causal" in config:
        return None
    return "it may attend in both directions, and config.json has no `is_causal`"


DIFFERENCES: dict[str, Difference] = {"nomic_bert": _nomic_difference}


def _require_one_repository(code: OwnCode, files: CheckpointFiles) -> None:
    """Raise an error for code of two repositories, of which one commit cannot pin both."""
    repositories = {reference.repository for reference in code.classes}
    if len(repositories) > 1 and not has_local_code(files.checkpoint, code.classes):
        names = ", ".join(sorted(name or "its own repository" for name in repositories))
        raise ModelUnavailable(
            f"{files.checkpoint} has code in several repositories ({names}), which one `code_revision` "
            "cannot pin; copy the checkpoint and all code files into one folder and give it as `model`"
        )


def _require_native_tokenizer(files: CheckpointFiles) -> None:
    """Raise an error for a tokenizer that is code: the engine reads tokenizer.json and runs no such code."""
    reference = read_auto_map(files.tokenizer_config).get("AutoTokenizer")
    if reference is not None and reference.name.removesuffix("Fast") not in TOKENIZER_CLASSES:
        raise ModelUnavailable(
            f"{files.checkpoint} has a tokenizer of its own, {reference.label}, which the built-in engine "
            "does not run, with `trust_remote_code` neither; serve it with another backend"
        )


TOKENIZER_CLASSES = frozenset(
    name.removesuffix("Fast") for name in TOKENIZER_MAPPING_NAMES.values() if name is not None
)
