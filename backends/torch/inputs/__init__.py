"""From a request to the sequences of a network."""
