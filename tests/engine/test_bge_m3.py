"""BGE-M3's three outputs in one pass, against FlagEmbedding's definition in plain torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import DTypeName
from tests.engine.checkpoints import make_m3
from tests.engine.engines import TEXTS, cosines, encode, engine_on, load_tiny, run_work

ALL = (Output.DENSE, Output.SPARSE, Output.MULTIVECTOR, Output.TOKENS)
# [PAD], [UNK], [CLS] and [SEP] of the tiny model's tokenizer.
SPECIAL_IDS = {0, 100, 101, 102}


@pytest.fixture
def checkpoint(minilm: Path, tmp_path: Path) -> tuple[Path, SentenceTransformer]:
    return make_m3(minilm, tmp_path)


def linear(folder: Path, name: str, hidden: Tensor) -> Tensor:
    state = torch.load(folder / name, weights_only=True)
    return hidden @ state["weight"].T + state["bias"]


def lexical(folder: Path, ids: list[int], hidden: Tensor) -> dict[int, float]:
    weights: dict[int, float] = {}
    values = linear(folder, "sparse_linear.pt", hidden).relu()[:, 0].tolist()
    for token, weight in zip(ids, values, strict=True):
        if token not in SPECIAL_IDS and weight > weights.get(token, 0):
            weights[token] = weight
    return weights


async def test_one_pass_gives_all_outputs_as_flagembedding_defines_them(
    checkpoint: tuple[Path, SentenceTransformer],
) -> None:
    folder, reference = checkpoint
    model = load_tiny(folder)

    reply = await encode(engine_on(model), TEXTS, *ALL)

    assert model.packed
    assert frozenset(ALL) == model.capabilities.outputs
    np.testing.assert_allclose(reply.dense, reference.encode(TEXTS), atol=1e-4)
    for i, text in enumerate(TEXTS):
        features = reference.preprocess([text])
        with torch.inference_mode():
            hidden = reference[0](features)["token_embeddings"][0]
        ids = features["input_ids"][0].tolist()
        terms = (reply.sparse or ())[i]
        expected = lexical(folder, ids, hidden)
        assert sorted(expected) == terms.indices.tolist()
        np.testing.assert_allclose(terms.values, [expected[id_] for id_ in sorted(expected)], atol=1e-4)
        late = nn.functional.normalize(linear(folder, "colbert_linear.pt", hidden[1:]), dim=-1)
        np.testing.assert_allclose((reply.multivector or ())[i], late, atol=1e-4)
        np.testing.assert_allclose((reply.token_vectors or ())[i], hidden, atol=1e-4)
    assert sum(len(terms.indices) for terms in reply.sparse or ()) > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_output_does_not_depend_on_the_other_requested_outputs(
    dtype: DTypeName, checkpoint: tuple[Path, SentenceTransformer]
) -> None:
    folder, reference = checkpoint
    engine = engine_on(load_tiny(folder, dtype))

    everything = await encode(engine, TEXTS, *ALL)
    dense = await run_work(engine, Embed(tuple(TEXTS)), EmbedReply)
    late = await encode(engine, TEXTS, Output.MULTIVECTOR)

    assert everything.dense is not None
    least = 0.99999 if dtype == "float32" else 0.9999
    assert cosines(everything.dense, dense.vectors).min() > least
    assert cosines(everything.dense, reference.encode(TEXTS)).min() > 0.999
    assert cosines(flat(everything), flat(late)).min() > least
    assert late.dense is None
    assert late.sparse is None


def flat(reply: EncodeReply) -> Vectors:
    return np.concatenate(reply.multivector or ())


async def test_dimensions_cut_only_the_dense_vector(checkpoint: tuple[Path, SentenceTransformer]) -> None:
    engine = engine_on(load_tiny(checkpoint[0]))

    reply = await run_work(engine, Encode(("a",), frozenset(ALL), dimensions=5), EncodeReply)

    assert reply.dense is not None
    assert reply.dense.shape == (1, 5)
    assert (reply.multivector or ())[0].shape == (2, 32)


class Harmful:
    """Object that runs code when a file of weights is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harmed"),)


async def test_rejects_code_in_a_weights_file(
    checkpoint: tuple[Path, SentenceTransformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Harmful()}, checkpoint[0] / "sparse_linear.pt")

    with pytest.raises(ModelUnavailable, match=r"sparse_linear\.pt could not be read"):
        load_tiny(checkpoint[0])
    assert not (tmp_path / "harmed").exists()
