"""Facts about Infinity that are known without its adapter."""

from backends.contract import Ask, LiteLLMProvider, ServerKind, listed_models


def _recognize(ask: Ask) -> tuple[str, ...] | None:
    own = ask("/models")
    models = listed_models(own)
    return models if models and all("stats" in item for item in own["data"]) else None


# It counts characters. It sorts all that waits in it by length before it forms batches, so it needs much to
# choose from. But single texts that come one by one get batches of their own: two small batches fill the
# first window.
INFINITY = ServerKind(
    "infinity",
    "backends.infinity.adapter",
    recognize=_recognize,
    litellm={"infinity": LiteLLMProvider(suffix="/v1")},
    needs_tokenizer=True,
    window=16,
    small_batch_slots=8,
)
