"""Networks as transformers implements them; imported where a checkpoint needs one, which takes 3 s."""
