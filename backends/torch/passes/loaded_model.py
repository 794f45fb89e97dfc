"""Loaded checkpoint as the engine runs it."""

import msgspec

from backends.contract import Capabilities
from backends.recipe.recipe import Recipe
from backends.torch.inputs.preparing import Preparer
from backends.torch.inputs.sequences import Head
from backends.torch.media.preparing import MediaPreparer

# Tokens of one forward pass. A processor gains nothing from more, and the next request waits for the whole
# batch; only a large batch keeps a GPU busy.
CPU_BATCH_TOKENS = 1024
GPU_BATCH_TOKENS = 16384
# A static model computes so little that a pass of the same size would be mostly its fixed costs.
STATIC_BATCH_TOKENS = 8192
# Ten pictures of CLIP ViT-B/32. Two took a tenth longer for each, and texts do not wait for them in any case.
MEDIA_CPU_BATCH_TOKENS = 512


class LoadedModel(msgspec.Struct, frozen=True):
    """Recipe, preparation of texts, network and capabilities of a loaded checkpoint.

    packed: True if a forward pass computes no padding. batch_tokens: tokens that a pass should hold.
    reentrant: True if two passes may run at once. media: preparation of pictures or recordings, None for a
    network of texts.
    """

    recipe: Recipe
    preparer: Preparer
    head: Head
    capabilities: Capabilities
    packed: bool = False
    batch_tokens: int = CPU_BATCH_TOKENS
    reentrant: bool = True
    media: MediaPreparer | None = None
