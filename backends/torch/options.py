"""Values that an operator may set for a checkpoint in place of what its own files declare.

The configuration schema and the engine share them. This module imports nothing of ours, so that the schema
stays light.
"""

from typing import Literal, TypeAlias

import msgspec

# `upstreams.<name>.task` and `upstreams.<name>.pooling`.
Task: TypeAlias = Literal["embed", "rerank"]
Pooling: TypeAlias = Literal["cls", "max", "mean", "weighted_mean", "last_token", "splade"]


class TaskSettings(msgspec.Struct, frozen=True):
    """Task and pooling that the operator configured; None leaves the choice to the checkpoint's files."""

    task: Task | None = None
    pooling: Pooling | None = None
