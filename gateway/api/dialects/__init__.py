"""Wire dialects: one module per API that callers speak."""
