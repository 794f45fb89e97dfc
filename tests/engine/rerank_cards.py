"""Prompts and scores of rerankers, written as their model cards and libraries compute them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Ids = list[int]
Encode = Callable[[str], Ids]


def encode_with(folder: Path) -> Encode:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def qwen3_ids(folder: Path, query: str, document: str, instruction: str | None = None) -> Ids:
    """Return the ids as the card of Qwen3-Reranker joins them: prefix, body and suffix."""
    encode = encode_with(folder)
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    body = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    return encode(prefix) + encode(body) + encode(suffix)


def mxbai_ids(folder: Path, query: str, document: str, instruction: str | None = None) -> Ids:
    """Return the ids as the package mxbai-rerank joins them."""
    encode = encode_with(folder)
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your "
        "binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    )
    before = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
    )
    asked = f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
    pair = encode(asked) + encode("\n") + encode(f"document: {document}")
    return encode(before) + pair + encode("\n") + encode(task) + encode("<|im_end|>\n<|im_start|>assistant\n")


def bge_ids(folder: Path, query: str, document: str, instruction: str | None = None) -> Ids:
    """Return the ids as FlagEmbedding joins them."""
    encode = encode_with(folder)
    bos = AutoTokenizer.from_pretrained(folder).bos_token_id
    prompt = instruction or (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
        "providing a prediction of either 'Yes' or 'No'."
    )
    pair = encode(f"A: {query}") + encode("\n") + encode(f"B: {document}")
    return [bos, *pair, *encode("\n"), *encode(prompt)]


def score_by_card(folder: Path, rows: list[Ids], answers: tuple[str, ...]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    encode = encode_with(folder)
    ids = [encode(answer) for answer in answers]
    assert [1] * len(ids) == [len(answer) for answer in ids]
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows]
    return np.array(
        [float(row[ids[0][0]]) - (float(row[ids[1][0]]) if len(ids) > 1 else 0) for row in logits]
    )
