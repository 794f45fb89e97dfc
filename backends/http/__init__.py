"""HTTP client of all adapters, and the parts of wires that several kinds of server share."""
