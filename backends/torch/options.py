"""Values that an operator may set for a checkpoint in place of what its own files declare.

The configuration schema and the engine share them. It imports nothing, so that the schema stays light.
"""

from typing import Literal, TypeAlias

# `upstreams.<name>.task` and `upstreams.<name>.pooling`.
Task: TypeAlias = Literal["embed", "rerank"]
Pooling: TypeAlias = Literal["cls", "max", "mean", "weighted_mean", "last_token", "splade"]
