"""Works for real servers: the same for every server of a kind of model."""

from typing import Any, Literal

from backends.contract import (
    Classify,
    Detokenize,
    Embed,
    Encode,
    Output,
    Rerank,
    Score,
    Tokenize,
    Truncate,
    Work,
)

Task = Literal["embed", "rerank", "classify"]

LONG = "word " * 600
QUERY = "how are threads joined"
DOCUMENTS = ("Wait until the thread terminates.", "Read a line of a file.", "", "Größe und Maß", LONG)

EMBEDS: dict[str, Work] = {
    "plain": Embed(("a", "the quick brown fox", "Größe Ångström 素早い")),
    "dimensions": Embed(("the quick brown fox",), dimensions=64),
    "not_normalized": Embed(("the quick brown fox",), normalize=False),
    "long_cut_right": Embed(("a", LONG)),
    "long_cut_left": Embed((LONG,), truncate=Truncate.LEFT),
    "short_cut_left": Embed(("a",), truncate=Truncate.LEFT),
    "long_refused": Embed((LONG,), truncate=Truncate.ERROR),
    "too_many_dimensions": Embed(("a",), dimensions=4096),
    "unknown_prompt": Embed(("a",), prompt_name="nowhere"),
    "tokens": Tokenize(("hello wörld", "a")),
    "tokens_without_specials": Tokenize(("hello wörld",), add_special_tokens=False),
    "pairs": Rerank(QUERY, DOCUMENTS[:2]),
}
RERANKS: dict[str, Work] = {
    "scores": Rerank(QUERY, DOCUMENTS),
    "raw_scores": Rerank(QUERY, DOCUMENTS, raw_scores=True),
    "long_refused": Rerank(QUERY, (LONG,), truncate=Truncate.ERROR),
    "long_cut_left": Rerank(QUERY, (LONG,), truncate=Truncate.LEFT),
    "vectors": Embed(("a",)),
}
PAIRS = ((QUERY, DOCUMENTS[0]), ("read a file", DOCUMENTS[1]), (QUERY, DOCUMENTS[3]), (QUERY, ""))
TEXTS = ("what a day", "leave me alone", "is anybody there")
CLASSIFIES: dict[str, Work] = {
    "labels": Classify(TEXTS),
    "long_cut_right": Classify(("a", LONG)),
    "long_refused": Classify((LONG,), truncate=Truncate.ERROR),
    "labels_of_pairs": Classify((("a", "b"),)),
    "vectors": Embed(("a",)),
    "pairs": Score(PAIRS),
}
# Works that are not compared with the engine, but with the server's other replies or with transformers.
OTHER_WORKS: dict[Task, dict[str, Work]] = {
    "embed": {
        "texts_of_ids": Detokenize(((101, 7592, 2088, 102), (7592,))),
        "texts_of_ids_with_specials": Detokenize(((101, 7592, 102),), skip_special_tokens=False),
        "sparse": Encode(("a",), frozenset({Output.SPARSE})),
        "multivector": Encode(("a",), frozenset({Output.MULTIVECTOR})),
        "labels": Classify(("a",)),
        "scored_pairs": Score(PAIRS),
    },
    "rerank": {
        "scored_pairs": Score(PAIRS),
        "raw_scored_pairs": Score(PAIRS, raw_scores=True),
        "long_pairs_refused": Score(((QUERY, LONG),), truncate=Truncate.ERROR),
        "labels": Classify(("a",)),
    },
    "classify": CLASSIFIES,
}
WORKS: dict[Task, dict[str, Work]] = {
    "embed": EMBEDS | OTHER_WORKS["embed"],
    "rerank": RERANKS | OTHER_WORKS["rerank"],
    "classify": CLASSIFIES | {"raw_labels": Classify(TEXTS, raw_scores=True)},
}

Requests = dict[str, tuple[str, dict[str, Any]]]

# Requests that no adapter sends, to record the refusals of each server.
INFINITY_REFUSALS: Requests = {
    "null": ("/embeddings", {"input": ["a"], "dimensions": None}),
    "empty_list": ("/embeddings", {"input": []}),
    "too_many": ("/embeddings", {"input": ["a"] * 2049}),
    "too_long": ("/embeddings", {"input": ["a" * 122_881]}),
    "dimensions": ("/embeddings", {"input": ["a"], "dimensions": 100_000}),
    "another_kind": ("/classify", {"input": ["a"]}),
    "no_such_path": ("/nothing", {}),
}
VLLM_REFUSALS: Requests = {
    "another_model": ("/v1/embeddings", {"model": "other", "input": ["a"]}),
    "another_model_scored": ("/v1/score", {"model": "other", "text_1": "a", "text_2": "b"}),
    "removed_switch": ("/v1/embeddings", {"input": ["a"], "normalize": True}),
    "empty_list": ("/v1/embeddings", {"input": []}),
    "wrong_type": ("/v1/score", {"text_1": 7, "text_2": "a"}),
    "too_long": ("/v1/score", {"text_1": "a", "text_2": [LONG]}),
    "no_such_path": ("/nothing", {}),
}
REFUSALS: dict[str, Requests] = {"infinity": INFINITY_REFUSALS, "vllm": VLLM_REFUSALS}
