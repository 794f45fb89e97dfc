"""How much a tenant may use: limits as pure arithmetic, ledgers that hold the state."""
