"""Least costs of requests, which are known before their bodies are read."""

from gateway.quotas.limits import Cost

# The least that a request can cost.
LEAST = Cost(requests=1, tokens=1, inputs=1)
# Tokenizing is free of tokens.
LEAST_WITHOUT_TOKENS = Cost(requests=1, tokens=0, inputs=1)
# Files and jobs reach no model themselves.
LEAST_OF_BATCHES = Cost(requests=1)
