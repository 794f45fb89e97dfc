"""Quotas of tenants: limits as pure arithmetic, and ledgers that hold the state."""
