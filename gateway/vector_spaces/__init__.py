"""Vector spaces: fingerprints of upstreams, and the replicas that differ from them."""
