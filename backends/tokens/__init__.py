"""Tokenization and token counts with a checkpoint's own tokenizer, without torch."""
