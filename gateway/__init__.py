"""One address for every embedding and rerank model: auth, quotas, routing, batching, dialects."""

__version__ = "0.1.0"
