"""Lane in front of an upstream: the queue, batches, attempts and retries."""
