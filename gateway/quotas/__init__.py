"""Tenant quotas: limits as pure arithmetic, and ledgers that keep the state."""
