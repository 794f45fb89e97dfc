"""Prices of models: from counted tokens to the money that limits and usage count. Pure."""

from collections.abc import Iterable

import msgspec

from gateway.quotas.limits import AMOUNT_MAX, Cost, Limit


class Price(msgspec.Struct, frozen=True):
    """Price of one token, in nano-units of the gateway's currency."""

    nano_per_token: int = 0
    currency: str = ""

    def cost(self, tokens: int, inputs: int = 0, images: int = 0, requests: int = 1) -> Cost:
        """Return the cost of a call with these counts."""
        money = min(AMOUNT_MAX, max(0, tokens) * self.nano_per_token)
        return Cost(requests, tokens, inputs, images, money, self.currency)

    def tokens_within(self, amounts: Iterable[tuple[Limit, int]]) -> int | None:
        """Return how many tokens amounts of limits are enough for, None if no limit counts tokens here."""
        return min(
            (found for limit, amount in amounts if (found := self._tokens_of(limit, amount)) is not None),
            default=None,
        )

    def _tokens_of(self, limit: Limit, amount: int) -> int | None:
        if limit.unit == "budget":
            return amount // self.nano_per_token if self.nano_per_token else None
        return amount if limit.unit == "tokens" else None


FREE = Price()
