"""Inspection of a checkpoint without loading its weights: what the engine would do with it, or why not.

`python -m backends.torch.inspection` reads the settings of a model as JSON from its standard input and writes
the inspection as JSON to its standard output. The command line runs it as a process of its own, because it
imports torch.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from backends.checkpoints import locate_tokenizer, stored_weight_bytes
from backends.contract import Capabilities
from backends.errors import ModelUnavailable
from backends.static_models import StaticModel, max_tokens
from backends.tokens import open_tokenizer
from backends.torch import wire
from backends.torch.adapter_choice import adapter_names
from backends.torch.files import CheckpointFiles
from backends.torch.load_plan import plan_load
from backends.torch.loader import describe
from backends.torch.loading import options_of
from backends.torch.memory import files_bytes
from backends.torch.rerank_template import RerankTemplate
from backends.torch.small_network import refuse_unloadable, try_network
from backends.torch.static_files import check_vocabulary, read_table_file
from backends.torch.weight_files import StoredTensor, stored_tensors
from backends.torch.weights import NetworkSource

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
# Parts of names of matrices that keep the number format of the files: tables and heads.
FLOAT_PARTS = ("embed", "shared", "pooler", "lm_head", "predictions", "classifier", "score", "vocab")
# Name of each type of config.json in bytes, for weights whose files are not on this machine.
STORED_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

Tensors: TypeAlias = Mapping[str, StoredTensor]


def inspect(boot: wire.ModelBoot) -> wire.Inspection:
    """Inspect a model with the settings of its upstream; fetch small files only."""
    try:
        folder = locate_tokenizer(boot.model, boot.revision)
    except ModelUnavailable as error:
        return wire.Inspection(boot.model, refusal=str(error))
    return inspect_folder(boot, folder)


def inspect_folder(boot: wire.ModelBoot, folder: Path) -> wire.Inspection:
    """Inspect a model whose small files are in a folder."""
    files = CheckpointFiles(folder)
    found = wire.Inspection(boot.model, str(folder))
    try:
        architectures = tuple(files.config.get("architectures") or ())
        found = msgspec.structs.replace(found, architectures=architectures)
        return _complete(found, boot, files)
    except ModelUnavailable as error:
        return msgspec.structs.replace(found, refusal=str(error))


def _complete(found: wire.Inspection, boot: wire.ModelBoot, files: CheckpointFiles) -> wire.Inspection:
    """Complete the inspection. Raises: ModelUnavailable."""
    folder, options = files.checkpoint, options_of(boot)
    plan = plan_load(folder, options)
    capabilities = describe(folder, boot.model, options)
    found = msgspec.structs.replace(found, kind=plan.recipe.kind, capabilities=capabilities)
    if files.static is not None:
        return _complete_static(found, boot, files, files.static)
    module_folders = [module.folder for module in files.modules if module.folder]
    tensors = stored_tensors(folder, module_folders)
    packed = None
    if plan.code is None:
        source = NetworkSource(folder, plan.recipe, plan.tokenizer, plan.template)
        refuse_unloadable(source, _of_network(tensors, module_folders))
        packed = try_network(source)
    return msgspec.structs.replace(
        found,
        packed=packed,
        template=_template_text(plan.template),
        weights=_weights(boot, files, tensors, capabilities.dtype),
        notes=(*_adapter_notes(boot, files), *_notes(capabilities, tensors, runs_code=plan.code is not None)),
    )


def _complete_static(
    found: wire.Inspection, boot: wire.ModelBoot, files: CheckpointFiles, static: StaticModel
) -> wire.Inspection:
    """Complete the inspection of a static model. Raises: ModelUnavailable."""
    capabilities, file = found.capabilities, read_table_file(static)
    assert capabilities is not None
    tensors = None if file is None else file.tensors
    if file is not None:
        tokenizer = open_tokenizer(files.checkpoint, max_tokens(static, files.checkpoint))
        check_vocabulary(static, file, tokenizer.vocabulary_size)
    return msgspec.structs.replace(
        found,
        packed=True,
        weights=_weights(boot, files, tensors, capabilities.dtype),
        notes=tuple(_notes(capabilities, tensors, runs_code=False)),
    )


def _of_network(tensors: Tensors | None, folders: Sequence[str]) -> dict[str, StoredTensor] | None:
    """Return the tensors without those of other modules."""
    if tensors is None:
        return None
    others = tuple(f"{folder}/" for folder in folders)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}


def _template_text(template: RerankTemplate) -> str | None:
    if not template.prompt:
        return None
    return "".join(piece.fill({slot: f"{{{slot}}}" for slot in piece.slots}) for piece in template.prompt)


def _weights(
    boot: wire.ModelBoot,
    files: CheckpointFiles,
    tensors: Mapping[str, StoredTensor] | None,
    dtype: str | None,
) -> wire.WeightSizes:
    """Estimate the memory of the loaded weights."""
    width = BYTES_PER_ELEMENT.get(dtype or "", BYTES_PER_ELEMENT["float32"])
    if tensors is not None:
        elements = sum(tensor.elements for tensor in tensors.values())
        file_bytes = sum(tensor.bytes for tensor in tensors.values())
        held = _int8_bytes(tensors) if dtype == "int8" else elements * width
        return wire.WeightSizes(file_bytes, elements, held)
    size = files_bytes(files.checkpoint) or stored_weight_bytes(boot.model, boot.revision)
    stored = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32")
    if size is None or stored not in STORED_BYTES:
        return wire.WeightSizes(size)
    elements = size // STORED_BYTES[stored]
    # Only names and shapes show which weights have 8 bits.
    return wire.WeightSizes(size, elements, None if dtype == "int8" else elements * width)


def _int8_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Estimate the memory of weights of which those of the encoder's linear layers have 8 bits."""
    return sum(
        tensor.elements if _is_quantized(name, tensor) else tensor.bytes for name, tensor in tensors.items()
    )


def _is_quantized(name: str, tensor: StoredTensor) -> bool:
    is_matrix = name.endswith("weight") and len(tensor.shape) == 2
    return is_matrix and not any(part in name for part in FLOAT_PARTS)


def _adapter_notes(boot: wire.ModelBoot, files: CheckpointFiles) -> Iterator[str]:
    names = adapter_names(files)
    if names and boot.adapter is None:
        yield f"served without an adapter; `adapter` merges one of: {', '.join(names)}"


def _notes(capabilities: Capabilities, tensors: Tensors | None, *, runs_code: bool) -> Iterator[str]:
    yield from capabilities.notes
    if tensors is None:
        yield "names and shapes of the weights were not compared: no safetensors files are on this machine"
    if not any(capabilities.prompts.values()) and capabilities.dimensions is not None:
        yield "the checkpoint brings no prompts; if its card asks for one, set `prompts` of the upstream"
    if runs_code:
        yield "code that comes with the checkpoint runs in the engine, because `trust_remote_code` is set"


def main() -> None:
    """Inspect the model whose settings are on standard input."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=wire.ModelBoot)
    sys.stdout.buffer.write(msgspec.json.encode(inspect(boot)))


if __name__ == "__main__":
    main()
