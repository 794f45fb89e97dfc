"""Embedding and rerank servers behind one contract; a library that knows nothing of the gateway."""
