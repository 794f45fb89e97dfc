"""Which vectors an upstream gives: the fingerprint of its vector space, and whether replicas fit it."""
