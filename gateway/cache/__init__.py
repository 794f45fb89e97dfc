"""Cache of vectors, one entry per text: keys, entries, and the two stores."""
