"""Inspection of a checkpoint without loading its weights: what the engine would do with it, or why not.

`python -m backends.torch.load.inspection` reads the settings of a model as JSON from its standard input and
writes the inspection as JSON to its standard output. The command line runs it as a process of its own,
because it imports torch.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from backends.checkpoints.locations import locate_checkpoint, locate_tokenizer, stored_weight_bytes
from backends.checkpoints.needed_files import has_weights, is_path
from backends.checkpoints.small_files import network_folder
from backends.checkpoints.static_models import StaticModel, max_tokens
from backends.contract import Capabilities
from backends.contract.errors import ModelUnavailable
from backends.recipe.adapter_choice import adapter_names
from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import ModelKind
from backends.recipe.rerank_template import RerankTemplate
from backends.tokens.tokenizer import open_tokenizer
from backends.torch import wire
from backends.torch.load.load_plan import plan_load
from backends.torch.load.loader import describe_folder, options_of, require_device, served_dtype
from backends.torch.load.weight_sizes import Tensors, sizes_of, tensors_of
from backends.torch.networks.opening import NetworkSource
from backends.torch.networks.static import check_vocabulary, read_table_file
from backends.torch.networks.weight_files import StoredTensor
from backends.torch.stock.small_network import refuse_unloadable, try_network


def inspect(boot: wire.ModelBoot) -> wire.Inspection:
    """Inspect a model with the settings of its upstream; fetch small files only."""
    try:
        folder = locate_tokenizer(boot.model, boot.revision)
    except ModelUnavailable as error:
        return wire.Inspection(boot.model, refusal=str(error))
    found = inspect_folder(boot, folder)
    if found.refusal is None and is_path(boot.model):
        try:
            locate_checkpoint(boot.model)
        except ModelUnavailable as error:
            return msgspec.structs.replace(found, refusal=str(error))
    return found


def inspect_folder(boot: wire.ModelBoot, folder: Path) -> wire.Inspection:
    """Inspect a model whose small files are in a folder."""
    found = wire.Inspection(boot.model, str(folder))
    try:
        files = CheckpointFiles(network_folder(folder))
        architectures = tuple(files.config.get("architectures") or ())
        found = msgspec.structs.replace(found, architectures=architectures)
        return _complete(found, boot, files)
    except ModelUnavailable as error:
        return msgspec.structs.replace(found, refusal=str(error))


def _complete(found: wire.Inspection, boot: wire.ModelBoot, files: CheckpointFiles) -> wire.Inspection:
    """Complete the inspection. Raises: ModelUnavailable."""
    folder, options = files.checkpoint, options_of(boot)
    require_device(boot.device)
    plan = plan_load(folder, options)
    capabilities = describe_folder(boot, folder)
    found = msgspec.structs.replace(found, kind=plan.recipe.kind, capabilities=capabilities)
    if files.static is not None:
        return _complete_static(found, boot, files, files.static)
    module_folders = [module.folder for module in files.modules if module.folder]
    tensors = tensors_of(files)
    packed = None
    if plan.code is None:
        source = NetworkSource(folder, plan.recipe, plan.tokenizer, plan.template)
        refuse_unloadable(source, _of_network(tensors, module_folders))
        packed = try_network(source)
    return msgspec.structs.replace(
        found,
        packed=packed,
        template=_template_text(plan.template),
        weights=_sizes(boot, files, plan.recipe.kind),
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
        weights=_sizes(boot, files, "static"),
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
    return "".join(
        piece.fill({placeholder: f"{{{placeholder}}}" for placeholder in piece.placeholders})
        for piece in template.prompt
    )


def _sizes(boot: wire.ModelBoot, files: CheckpointFiles, kind: ModelKind) -> wire.WeightSizes:
    dtype = served_dtype(files.checkpoint, options_of(boot))
    is_here = has_weights(files.checkpoint) or files.static is not None
    fetched_bytes = None if is_here else stored_weight_bytes(boot.model, boot.revision)
    return sizes_of(files, kind, dtype, fetched_bytes)


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
