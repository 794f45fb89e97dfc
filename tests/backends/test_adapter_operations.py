"""Tests of every adapter's operations other than embed, rerank and tokenize, against strict servers."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from backends.contract import (
    Backend,
    BackendKind,
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    Encode,
    EncodeReply,
    Operation,
    Output,
    ReplicaSpec,
    Rerank,
    RerankReply,
    Score,
    ScoreParts,
    TokenizerSource,
    Truncate,
    Work,
)
from backends.contract.errors import BackendError, InvalidWork, ReplicaFailed, UnsupportedWork
from backends.contract.vectors import sigmoid
from backends.http.media import probe_image
from tests.backends.adapters import SERVERS
from tests.conftest import remote_backend
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import CLASSIFIER, LABELS, RERANKER, SPLADE, respond_with
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.server import logit_of, token_rows
from tests.fakes.tei import FakeTei, logits_of, score_of, vector_of, weights_of
from tests.fakes.vllm import FakeVllm

LONG = "w " * 20


def stable_id(value: object) -> str:
    """Return a parameter's id that does not depend on the hash seed, as the repr of a set does."""
    outputs = f"[{','.join(sorted(value.outputs))}]" if isinstance(value, Encode) else ""
    return f"Encode{outputs}" if outputs else str(value)


TEXTS = ("red", "green and blue", "cyan")
PAIRS = (("q", "red"), ("r", "green and blue"), ("q", "cyan"))


def server_of(kind: BackendKind, does: str) -> Any:
    """Return a fake server of a kind of model; a wire without that kind gets its default model."""
    match kind, does:
        case "tei", _:
            types: dict[str, Any] = {"classify": CLASSIFIER, "score": RERANKER, "sparse": SPLADE}
            return FakeTei(model_type=types[does]) if does in types else FakeTei()
        case "infinity", "classify":
            return FakeInfinity(capability="classify")
        case "infinity", "score":
            return FakeInfinity(capability="rerank")
        case "infinity", _:
            return FakeInfinity(late=does == "multivector")
        case "vllm", "classify" | "score":
            return FakeVllm(task="classify", classes=len(LABELS) if does == "classify" else 1)
        case "vllm", "multivector" | "tokens":
            return FakeVllm(task="token_embed")
        case "vllm", _:
            return FakeVllm(splade=does == "sparse")
    return FakeOpenAI()


async def joined(kind: BackendKind, server: Any, tokenizer: str) -> tuple[Backend, Capabilities]:
    """Return the joined adapter; only Infinity and OpenAI count with the tokenizer."""
    source = TokenizerSource(tokenizer) if kind in ("infinity", "openai") else None
    spec = ReplicaSpec("http://one", tokenizer=source)
    backend = remote_backend(kind, spec, httpx.ASGITransport(server))
    return backend, await backend.describe(5.0)


async def run(kind: BackendKind, does: str, work: Work, tokenizer: str) -> Any:
    """Run the work at a server of that kind of model and return the reply."""
    backend, _ = await joined(kind, server_of(kind, does), tokenizer)
    return await backend.run(work, 5.0)


def count_tokens(*texts: str) -> int:
    """Count tokens as every fake does."""
    return sum(len(text.split()) + 2 for text in texts)


@pytest.mark.parametrize("kind", ["tei", "vllm"])
async def test_returns_the_term_weights_of_each_text(kind: BackendKind, small_files: str) -> None:
    reply = await run(kind, "sparse", Encode(TEXTS, frozenset({Output.SPARSE})), small_files)

    assert isinstance(reply, EncodeReply)
    assert count_tokens(*TEXTS) == reply.tokens
    sparse = reply.sparse or ()
    weights = [dict(zip(terms.indices.tolist(), terms.values.tolist(), strict=True)) for terms in sparse]
    assert [weights_of(text) for text in TEXTS] == weights
    assert all((np.diff(terms.indices) > 0).all() for terms in sparse)


@pytest.mark.parametrize(
    ("kind", "output", "scale"),
    [
        ("infinity", Output.MULTIVECTOR, 1),
        ("vllm", Output.MULTIVECTOR, 1),
        ("tei", Output.TOKENS, 3),
        ("vllm", Output.TOKENS, 2),
    ],
    ids=["late-infinity", "late-vllm", "raw-tei", "raw-vllm"],
)
async def test_returns_one_vector_per_token(
    kind: BackendKind, output: Output, scale: int, small_files: str
) -> None:
    is_late = output is Output.MULTIVECTOR
    does = "multivector" if is_late else "tokens"
    reply = await run(kind, does, Encode(TEXTS, frozenset({output})), small_files)

    assert count_tokens(*TEXTS) == reply.tokens
    for text, matrix in zip(TEXTS, reply.multivector if is_late else reply.token_vectors, strict=True):
        np.testing.assert_allclose(token_rows(text) * scale, matrix, rtol=1e-6)


async def test_tei_sends_one_request_per_kind_of_output(small_files: str) -> None:
    server = FakeTei()
    backend, _ = await joined("tei", server, small_files)
    work = Encode(TEXTS, frozenset({Output.DENSE, Output.TOKENS}), dimensions=4)
    reply = await backend.run(work, 5.0)

    assert isinstance(reply, EncodeReply)
    assert ["/v1/embeddings", "/embed_all"] == [path for path, _ in server.requests]
    assert ((3, 4), count_tokens(*TEXTS)) == (
        reply.dense.shape if reply.dense is not None else (),
        reply.tokens,
    )
    assert 3 == len(reply.token_vectors or ())


async def test_vllm_returns_two_kinds_of_token_vectors(small_files: str) -> None:
    work = Encode(TEXTS, frozenset({Output.MULTIVECTOR, Output.TOKENS}))
    reply = await run("vllm", "tokens", work, small_files)

    assert (3, 3, count_tokens(*TEXTS)) == (len(reply.multivector), len(reply.token_vectors), reply.tokens)


@pytest.mark.parametrize("raw_scores", [False, True])
@pytest.mark.parametrize("kind", ["tei", "infinity", "vllm"])
async def test_scores_pairs_in_order(kind: BackendKind, raw_scores: bool, small_files: str) -> None:
    reply = await run(kind, "score", Score(PAIRS, raw_scores=raw_scores), small_files)

    logits = np.array(
        [logits_of(pair, 1)[0] if kind == "tei" else logit_of(*pair) for pair in PAIRS], np.float32
    )
    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose(logits if raw_scores else sigmoid(logits), reply.scores, rtol=1e-5)
    assert 0 < reply.tokens


async def test_infinity_sends_one_request_per_query(small_files: str) -> None:
    server = FakeInfinity(capability="rerank")
    backend, _ = await joined("infinity", server, small_files)
    await backend.run(Score(PAIRS), 5.0)

    sent = [(body["query"], body["documents"]) for path, body in server.requests if path == "/rerank"]
    assert [("q", ["red", "cyan"]), ("r", ["green and blue"])] == sent


async def test_scores_pairs_with_an_empty_document(small_files: str) -> None:
    for kind in ("tei", "infinity", "vllm"):
        reply = await run(kind, "score", Score((("q", ""), ("q", "a"))), small_files)  # type: ignore[arg-type]
        assert 2 == len(reply.scores)


@pytest.mark.parametrize("kind", ["tei", "infinity", "vllm"])
async def test_label_scores_follow_the_models_order(kind: BackendKind, small_files: str) -> None:
    backend, capabilities = await joined(kind, server_of(kind, "classify"), small_files)
    reply = await backend.run(Classify(TEXTS), 5.0)

    assert isinstance(reply, ClassifyReply)
    assert Operation.CLASSIFY in capabilities.operations
    assert (capabilities.labels, count_tokens(*TEXTS)) == (reply.labels, reply.tokens)
    assert 3 == len(reply.labels)
    shares = np.exp([logits_of((text,), len(LABELS)) for text in TEXTS])
    shares /= shares.sum(axis=1, keepdims=True)
    # Alphabetical order, because no file names the labels.
    order = [LABELS.index(label) for label in sorted(LABELS)] if kind == "infinity" else [0, 1, 2]
    np.testing.assert_allclose(shares[:, order], reply.scores, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tei", "vllm"])
async def test_raw_label_scores_are_logits(kind: BackendKind, small_files: str) -> None:
    reply = await run(kind, "classify", Classify(("red",), raw_scores=True), small_files)

    np.testing.assert_allclose([logits_of(("red",), len(LABELS))], reply.scores, rtol=1e-5)


async def test_tei_classifies_pairs(small_files: str) -> None:
    server = server_of("tei", "classify")
    backend, _ = await joined("tei", server, small_files)
    reply = await backend.run(Classify(("red", ("a", "b")), raw_scores=True), 5.0)

    assert isinstance(reply, ClassifyReply)
    assert [["red"], ["a", "b"]] == server.requests[-1][1]["inputs"]
    expected = [logits_of(("red",), 3), logits_of(("a", "b"), 3)]
    np.testing.assert_allclose(expected, reply.scores, rtol=1e-5)


async def test_checkpoint_files_name_the_labels(tmp_path: Path) -> None:
    source = TokenizerSource(str(write_small_files(tmp_path, labels=LABELS)))
    spec = ReplicaSpec("http://one", tokenizer=source)
    kinds: list[BackendKind] = ["infinity", "vllm"]
    for kind in kinds:
        backend = remote_backend(kind, spec, httpx.ASGITransport(server_of(kind, "classify")))

        assert (await backend.describe(5.0)).labels == LABELS


@pytest.mark.parametrize(("skip", "expected"), [(True, ("t7", "t8 t9")), (False, ("t101 t7 t102", "t8 t9"))])
@pytest.mark.parametrize("kind", ["tei", "vllm"])
async def test_detokenizes(
    kind: BackendKind, skip: bool, expected: tuple[str, ...], small_files: str
) -> None:
    work = Detokenize(((101, 7, 102), (8, 9)), skip_special_tokens=skip)

    assert DetokenizeReply(expected) == await run(kind, "embed", work, small_files)


@pytest.mark.parametrize("kind", ["infinity", "openai"])
async def test_detokenizes_with_the_local_tokenizer(kind: BackendKind, small_files: str) -> None:
    works = [Detokenize(((1, 0, 2),), skip_special_tokens=skip) for skip in (True, False)]
    replies = [await run(kind, "embed", work, small_files) for work in works]

    assert [DetokenizeReply(("[UNK]",)), DetokenizeReply(("[CLS] [UNK] [SEP]",))] == replies
    with pytest.raises(InvalidWork, match="4711"):
        await run(kind, "embed", Detokenize(((1, 4711),)), small_files)


OFFERED: list[tuple[BackendKind, str, set[Operation], set[Output]]] = [
    ("tei", "embed", {Operation.EMBED, Operation.ENCODE}, {Output.DENSE, Output.TOKENS}),
    ("tei", "sparse", {Operation.ENCODE}, {Output.SPARSE}),
    ("tei", "classify", {Operation.CLASSIFY}, set()),
    ("tei", "score", {Operation.RERANK, Operation.CLASSIFY}, set()),
    ("infinity", "embed", {Operation.EMBED}, {Output.DENSE}),
    ("infinity", "multivector", {Operation.ENCODE}, {Output.MULTIVECTOR}),
    ("infinity", "classify", {Operation.CLASSIFY}, set()),
    ("infinity", "score", {Operation.RERANK}, set()),
    ("vllm", "embed", {Operation.EMBED}, {Output.DENSE}),
    ("vllm", "sparse", {Operation.ENCODE}, {Output.SPARSE}),
    ("vllm", "multivector", {Operation.ENCODE}, {Output.MULTIVECTOR, Output.TOKENS}),
    ("vllm", "classify", {Operation.CLASSIFY}, set()),
    ("vllm", "score", {Operation.RERANK, Operation.CLASSIFY}, set()),
    ("openai", "embed", {Operation.EMBED}, {Output.DENSE}),
]


@pytest.mark.parametrize(
    ("kind", "does", "operations", "outputs"), OFFERED, ids=[f"{kind}-{does}" for kind, does, *_ in OFFERED]
)
async def test_describes_the_operations_and_outputs_of_a_model(
    kind: BackendKind, does: str, operations: set[Operation], outputs: set[Output], small_files: str
) -> None:
    _, capabilities = await joined(kind, server_of(kind, does), small_files)

    assert operations | {Operation.TOKENIZE, Operation.DETOKENIZE} == capabilities.operations
    assert outputs == capabilities.outputs
    assert (Operation.CLASSIFY in operations) == bool(capabilities.labels)


SPARSE = Encode(("a",), frozenset({Output.SPARSE}))
MULTIVECTOR = Encode(("a",), frozenset({Output.MULTIVECTOR}))
TOKENS = Encode(("a",), frozenset({Output.TOKENS}))
BOTH = Encode(("a",), frozenset({Output.DENSE, Output.MULTIVECTOR}))
REFUSED: list[tuple[BackendKind, str, Work]] = [
    ("tei", "embed", SPARSE),
    ("tei", "embed", MULTIVECTOR),
    ("tei", "embed", Score(PAIRS)),
    ("tei", "embed", Classify(("a",))),
    ("tei", "sparse", Encode(("a",), frozenset({Output.TOKENS}))),
    ("infinity", "embed", SPARSE),
    ("infinity", "embed", MULTIVECTOR),
    ("infinity", "multivector", BOTH),
    ("infinity", "embed", Score(PAIRS)),
    ("infinity", "classify", Classify(("a",), raw_scores=True)),
    ("infinity", "classify", Classify((("a", "b"),))),
    ("infinity", "classify", Classify((LONG,), truncate=Truncate.LEFT)),
    ("infinity", "score", Score((("q", LONG),), truncate=Truncate.LEFT)),
    ("vllm", "embed", SPARSE),
    ("vllm", "embed", MULTIVECTOR),
    ("vllm", "multivector", BOTH),
    ("vllm", "embed", Score(PAIRS)),
    ("vllm", "embed", Classify(("a",))),
    ("vllm", "classify", Classify((("a", "b"),))),
    ("vllm", "score", Score((("q", LONG),), truncate=Truncate.LEFT)),
    ("vllm", "score", Score(PAIRS, instruction="find")),
    ("tei", "score", Score(PAIRS, instruction="find")),
    ("tei", "score", Rerank("q", ("a",), instruction="find")),
    ("infinity", "score", Score(PAIRS, instruction="find")),
    ("infinity", "score", Rerank("q", ("a",), instruction="find")),
    ("infinity", "embed", TOKENS),
    ("openai", "embed", SPARSE),
    ("openai", "embed", MULTIVECTOR),
    ("openai", "embed", TOKENS),
    ("openai", "embed", BOTH),
    ("openai", "embed", Rerank("q", ("a",), raw_scores=True)),
    ("openai", "embed", Classify((("a", "b"),), raw_scores=True)),
    ("openai", "embed", Score(PAIRS)),
    ("openai", "embed", Classify(("a",))),
]


@pytest.mark.parametrize(("kind", "does", "work"), REFUSED, ids=stable_id)
async def test_refuses_work_the_wire_cannot_express(
    kind: BackendKind, does: str, work: Work, small_files: str
) -> None:
    with pytest.raises(UnsupportedWork) as caught:
        await run(kind, does, work, small_files)

    assert "upstream" in caught.value.message


@pytest.mark.parametrize(
    ("does", "work"),
    [
        ("score", Score((("q", LONG),), truncate=Truncate.ERROR)),
        ("classify", Classify((LONG,), truncate=Truncate.ERROR)),
    ],
)
@pytest.mark.parametrize("kind", ["tei", "infinity", "vllm"])
async def test_too_long_input_is_invalid_work(
    kind: BackendKind, does: str, work: Work, small_files: str
) -> None:
    with pytest.raises(InvalidWork):
        await run(kind, does, work, small_files)


@pytest.mark.parametrize(
    ("does", "work"), [("score", Score((("q", LONG),))), ("classify", Classify((LONG,)))]
)
@pytest.mark.parametrize("kind", ["tei", "infinity", "vllm"])
async def test_never_reports_truncated_inputs_as_complete(
    kind: BackendKind, does: str, work: Work, small_files: str
) -> None:
    reply = await run(kind, does, work, small_files)

    assert (0,) == reply.truncated if kind == "infinity" else reply.truncated is None
    assert 16 == reply.tokens


WORKS: list[tuple[BackendKind, str, Work]] = [
    *((kind, "embed", Embed(("a",))) for kind in SERVERS),
    ("tei", "sparse", SPARSE),
    ("tei", "tokens", Encode(("a",), frozenset({Output.TOKENS}))),
    ("tei", "score", Score(PAIRS)),
    ("tei", "classify", Classify(("a",))),
    ("tei", "embed", Detokenize(((1,),))),
    ("infinity", "multivector", MULTIVECTOR),
    ("infinity", "score", Score(PAIRS)),
    ("infinity", "classify", Classify(("a",))),
    ("vllm", "sparse", SPARSE),
    ("vllm", "multivector", MULTIVECTOR),
    ("vllm", "score", Score(PAIRS)),
    ("vllm", "classify", Classify(("a",))),
    ("vllm", "embed", Detokenize(((1,),))),
]
ERRORS = [401, 404, 424, 500]
INVALID_BODIES = [
    b"",
    b"<html>",
    b"[]",
    b"{}",
    b"[[",
    b"null",
    b'{"data":[]}',
    b'[[{"score":NaN,"label":"joy"}]]',
]


@pytest.mark.parametrize(
    ("status", "body"), [*((200, body) for body in INVALID_BODIES), *((status, b"") for status in ERRORS)]
)
@pytest.mark.parametrize(("kind", "does", "work"), WORKS, ids=stable_id)
async def test_invalid_replies_and_errors_are_not_the_callers_fault(
    kind: BackendKind, does: str, work: Work, status: int, body: bytes, small_files: str
) -> None:
    server = server_of(kind, does)
    backend, _ = await joined(kind, server, small_files)
    server.hook = respond_with(status, body)
    with pytest.raises(ReplicaFailed if status == 200 else BackendError) as caught:
        await backend.run(work, 5.0)

    assert "upstream" == caught.value.source


@pytest.mark.parametrize("kind", SERVERS)
async def test_pairs_with_images_are_refused_by_wires_of_texts(kind: BackendKind, small_files: str) -> None:
    work = ScoreParts(((("q",), (probe_image(),)),))
    backend, capabilities = await joined(kind, server_of(kind, "embed"), small_files)

    assert not work.is_offered_by(capabilities)
    with pytest.raises(UnsupportedWork):
        await backend.run(work, 5.0)


async def test_rerank_and_its_pairs_have_equal_scores(small_files: str) -> None:
    for kind in ("infinity", "vllm"):
        ranked = await run(kind, "score", Rerank("q", TEXTS), small_files)  # type: ignore[arg-type]
        paired = await run(kind, "score", Score(tuple(("q", text) for text in TEXTS)), small_files)  # type: ignore[arg-type]
        np.testing.assert_allclose(ranked.scores, paired.scores, rtol=1e-6)
        assert ranked.tokens == paired.tokens


def test_fakes_return_different_values_for_different_texts() -> None:
    assert len({score_of("q", text) for text in TEXTS}) == len(TEXTS)
    assert len({vector_of(text).tobytes() for text in TEXTS}) == len(TEXTS)
