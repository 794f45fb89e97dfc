"""Parts of wire formats that several dialects share."""
