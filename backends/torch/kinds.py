"""Which kind of model a checkpoint is: one table, read from the top, of what its files show.

Pure. docs/backends.md tells the same table to users.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from backends.errors import ModelUnavailable
from backends.torch.files import Files
from backends.torch.options import Pooling, Task

# dense: token vectors are pooled. sparse: a masked language model's weights for terms. multivector: a vector
# a token. classifier: a sequence classifier; with one label it reranks. language: a causal language model
# whose next word is yes or no.
ModelKind: TypeAlias = Literal["dense", "sparse", "multivector", "classifier", "language"]


class Said(msgspec.Struct, frozen=True):
    """What the operator said of a checkpoint."""

    task: Task | None = None
    pooling: Pooling | None = None


Sign: TypeAlias = Callable[[Files, Said], bool]


def _is_a(ending: str) -> Sign:
    return lambda files, _: any(
        str(name).endswith(ending) for name in files.config.get("architectures") or []
    )


def _lists(module: str) -> Sign:
    return lambda files, _: files.folder(module) is not None


def _both(one: Sign, other: Sign) -> Sign:
    return lambda files, said: one(files, said) and other(files, said)


# The first that holds decides.
SIGNS: tuple[tuple[Sign, ModelKind], ...] = (
    (lambda _, said: said.pooling == "splade", "sparse"),
    (lambda _, said: said.pooling is not None or said.task == "embed", "dense"),
    (_lists("LogitScore"), "language"),
    (_both(lambda _, said: said.task == "rerank", _is_a("ForCausalLM")), "language"),
    (_lists("SpladePooling"), "sparse"),
    # PyLate says ColBERT, sentence-transformers MultiVectorEncoder; the original has no such file.
    (lambda files, _: files.sentence.get("model_type") in {"ColBERT", "MultiVectorEncoder"}, "multivector"),
    (_is_a("HF_ColBERT"), "multivector"),
    (_lists("Pooling"), "dense"),
    (_is_a("ForSequenceClassification"), "classifier"),
    (lambda *_: True, "dense"),
)

# The modules of sentence-transformers that are understood in each kind.
MODULES: dict[ModelKind, set[str]] = {
    "dense": {"Transformer", "Pooling", "Dense", "Normalize"},
    "sparse": {"Transformer", "MLMTransformer", "SpladePooling"},
    "multivector": {"Transformer", "Dense", "Normalize", "MultiVectorMask"},
    "classifier": {"Transformer"},
    "language": {"Transformer", "LogitScore"},
}


def recognize(files: Files, said: Said) -> ModelKind:
    """Raises: ModelUnavailable where a module is not understood, or cannot be what the operator said."""
    kind = next(kind for sign, kind in SIGNS if sign(files, said))
    unknown = {one.kind for one in files.modules} - MODULES[kind]
    if unknown:
        raise ModelUnavailable(
            f"{files.checkpoint} uses the sentence-transformers module {', '.join(sorted(unknown))}, which "
            "the built-in engine does not have; serve it with TEI or Infinity behind this gateway"
        )
    if said.task == "rerank" and kind not in {"classifier", "language", "multivector"}:
        raise ModelUnavailable(
            f"{files.checkpoint} is no reranker, though `task: rerank` says so: it has no classifier, no "
            "language model and no vectors of late interaction"
        )
    return kind
