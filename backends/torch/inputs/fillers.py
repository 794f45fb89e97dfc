"""Token that fills up queries of late interaction, or the texts of a dual encoder. Pure."""

from collections.abc import Callable

from backends.contract.errors import ModelUnavailable
from backends.recipe.recipe import QueryExpansion


def filler_id(expansion: QueryExpansion | None, token_id: Callable[[str], int | None]) -> int:
    """Return the id that fills up texts. token_id: returns that of a token, None for an unknown one.

    Raises: ModelUnavailable if the vocabulary has none of the tokens.
    """
    if expansion is None:
        return 0
    found = [token_id(token) for token in expansion.tokens]
    ids = [id_ for id_ in found if id_ is not None]
    if not ids or (expansion.is_stated and found[0] is None):
        names = " or ".join(map(repr, expansion.tokens)) or "its mask or end token, which no file names"
        raise ModelUnavailable(
            f"queries are filled up with {names}, which the vocabulary does not have: name the token as "
            "`token` of `query_expansion`, or as `mask_token` in tokenizer_config.json"
        )
    return ids[0]
