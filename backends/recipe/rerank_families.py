"""Published rerankers: their templates by family, the ids that name them, and those that cannot be served.

Pure. docs/backends.md shows the same families to users.
"""

from pathlib import PurePath

from backends.recipe.options import RerankFamily
from backends.recipe.rerank_template import RerankTemplate, open_prompt_of, prompt_of

# Source: the model card of Qwen/Qwen3-Reranker-0.6B, "Transformers Usage".
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Source: class MxbaiRerankV2 of the package mxbai-rerank, which tokenizes each of these on its own.
_MXBAI_BEFORE = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
_MXBAI_QUERY = "query: {query}"
_MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
)
_MXBAI_AFTER = ("\n", "document: {document}", "\n", _MXBAI_TASK, "<|im_end|>\n<|im_start|>assistant\n")
# Source: class BaseLLMReranker of FlagEmbedding 1.3, which tokenizes each of these on its own after the BOS.
_BGE = ("A: {query}", "\n", "B: {document}", "\n", "{instruction}")
_BGE_INSTRUCTION = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'."
)
# Source: the model card of nvidia/llama-nemotron-rerank-1b-v2.
_NEMOTRON = "question:{query} \n \n passage:{document}"

FAMILIES: dict[RerankFamily, RerankTemplate] = {
    "qwen3": RerankTemplate(
        prompt_of(_QWEN3, instruction=_QWEN3_INSTRUCTION), open_prompt_of(_QWEN3), "yes", "no"
    ),
    "mxbai-v2": RerankTemplate(
        prompt_of(_MXBAI_BEFORE, _MXBAI_QUERY, *_MXBAI_AFTER),
        open_prompt_of(_MXBAI_BEFORE, "instruction: {instruction}\n" + _MXBAI_QUERY, *_MXBAI_AFTER),
        "1",
        "0",
    ),
    "bge-gemma": RerankTemplate(
        prompt_of(*_BGE, instruction=_BGE_INSTRUCTION), open_prompt_of(*_BGE), "Yes", special_tokens=True
    ),
    "nemotron": RerankTemplate(prompt_of(_NEMOTRON), special_tokens=True),
    "pair": RerankTemplate(),
}
PUBLISHED: dict[str, RerankFamily] = {
    **{f"Qwen/Qwen3-Reranker-{size}": "qwen3" for size in ("0.6B", "4B", "8B")},
    **{f"tomaarsen/Qwen3-Reranker-{size}-seq-cls": "qwen3" for size in ("0.6B", "4B", "8B")},
    "mixedbread-ai/mxbai-rerank-base-v2": "mxbai-v2",
    "mixedbread-ai/mxbai-rerank-large-v2": "mxbai-v2",
    "BAAI/bge-reranker-v2-gemma": "bge-gemma",
    "nvidia/llama-nemotron-rerank-1b-v2": "nemotron",
    "nvidia/llama-3.2-nv-rerankqa-1b-v2": "nemotron",
}
# Architectures whose own code does more than score one pair. `trust_remote_code` does not change that.
REFUSED: dict[str, str] = {
    "JinaForRanking": "it scores all documents of a query in one pass, and a call is served in several",
    "JinaVLForRanking": "it reads images as well as text",
    "LayerWiseMiniCPMForCausalLM": "it has a scoring head in each of its upper layers",
    "CostWiseGemmaForCausalLM": "it drops tokens between its layers and has a scoring head in several",
}


def published_family(model: str) -> RerankFamily | None:
    """Return the family of a hub id, or of a folder named as a published checkpoint; None if not known."""
    if not PurePath(model).is_absolute():
        return PUBLISHED.get(model)
    folder = PurePath(model).name
    return next((family for name, family in PUBLISHED.items() if name.endswith(f"/{folder}")), None)
