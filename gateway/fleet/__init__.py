"""The gateways that share a Redis: their records, and questions to all of them."""
