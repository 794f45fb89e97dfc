"""Text Embeddings Inference (TEI), over HTTP and gRPC."""
