"""Examples of request bodies for the OpenAPI document, by the name of the body's struct.

The models' names are those of docs and examples; a caller replaces them by its own.
"""

from typing import Any, Final

QUERY: Final = "what is a panda?"
TEXTS: Final = ["the panda eats bamboo", "Paris is in France"]

EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "BatchEmbedContentsRequest": {
        "requests": [{"model": "models/bge", "content": {"parts": [{"text": text}]}} for text in TEXTS]
    },
    "BatchRequest": {
        "input_file_id": "file-3f0a5d5e",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    },
    "DecodeRequest": {"ids": [101, 7592, 102]},
    "DefaultRequest": {"inputs": TEXTS},
    "DetokenizeRequest": {"tokens": [101, 7592, 102]},
    "EitherRerankRequest": {"query": QUERY, "texts": TEXTS},
    "CountTokensRequest": {"contents": [{"parts": [{"text": text}]} for text in TEXTS]},
    "CreateInstance": {"name": "minilm", "model_id": "sentence-transformers/all-MiniLM-L6-v2"},
    "EmbedContentRequest": {"content": {"parts": [{"text": QUERY}]}, "taskType": "RETRIEVAL_QUERY"},
    "EmbedRequest": {"inputs": TEXTS},
    "EmbedV1Request": {"model": "bge", "texts": TEXTS, "input_type": "search_document"},
    "EmbedV2Request": {
        "model": "bge",
        "texts": TEXTS,
        "input_type": "search_document",
        "embedding_types": ["float"],
    },
    "InfinityClassifyRequest": {"model": "emotions", "input": TEXTS},
    "InfinityEmbeddingsRequest": {"model": "bge", "input": TEXTS},
    "InfinityRerankRequest": {"model": "reranker", "query": QUERY, "documents": TEXTS},
    "KeyRequest": {"tenant": "search"},
    "MultimodalRequest": {"model": "clip", "inputs": [{"content": [{"type": "text", "text": TEXTS[0]}]}]},
    "OllamaEmbedRequest": {"model": "bge", "input": TEXTS},
    "OllamaEmbeddingsRequest": {"model": "bge", "prompt": TEXTS[0]},
    "OllamaShowRequest": {"model": "bge"},
    "OpenAIEmbeddingsRequest": {"model": "bge", "input": TEXTS},
    "PoolingRequest": {"model": "bge", "input": TEXTS},
    "PredictRequest": {"inputs": QUERY},
    "RankingRequest": {
        "model": "reranker",
        "query": {"text": QUERY},
        "passages": [{"text": text} for text in TEXTS],
    },
    "ReplicaBody": {"upstream": "bge-m3", "replica": "http://tei-0:8080"},
    "RerankRequest": {"model": "reranker", "query": QUERY, "documents": TEXTS, "top_n": 1},
    "SignInCode": {
        "name": "staff",
        "code": "SplxlOBeZQQYbYS6WxSbIA",
        "code_verifier": "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk",
        "nonce": "n-0S6_WzA2Mj-for-one-sign-in",
        "redirect_uri": "https://gateway.example.org/ui",
    },
    "SieEncodeRequest": {"items": [{"text": TEXTS[0]}], "params": {"output_types": ["dense"]}},
    "SieScoreRequest": {"query": {"text": QUERY}, "items": [{"text": text} for text in TEXTS]},
    "SimilarityRequest": {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}},
    "TeiEncodeRequest": {"inputs": TEXTS},
    "TokenizeRequest": {"inputs": TEXTS},
    "RegisterModel": {"model_id": "BAAI/bge-m3"},
    "VerifyBody": {"upstreams": ["bge-m3"]},
    "VertexRequest": {"instances": [{"inputs": TEXTS[0]}, {"inputs": TEXTS[1]}]},
    "VllmClassifyRequest": {"model": "emotions", "input": TEXTS},
    "VllmScoreRequest": {"model": "reranker", "queries": QUERY, "documents": TEXTS},
}
