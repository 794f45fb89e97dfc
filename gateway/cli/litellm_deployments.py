"""Deployments of one name of LiteLLM as upstreams of one model. Pure.

Equal deployments are the replicas of one upstream. Others become upstreams of their own, with their weights
and orders, if they serve the same model: the gateway compares their vectors before it uses them together.
"""

from collections.abc import Collection, Mapping
from typing import Any

from gateway.cli.litellm_providers import NotServed

# A part of a whole, as LiteLLM allows for weights, becomes a whole number.
WEIGHT_SCALE = 100


class Deployments:
    """Deployments of one name. upstream: name of the first one. served: the model that they serve."""

    def __init__(self, upstream: str, served: str) -> None:
        self._first = upstream
        self._served = _base_name(served)
        # By upstream: its settings, and the weight and the order of its deployments, None if absent.
        self._settings: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, tuple[float | None, int | None]] = {}

    def add(
        self, served: str, settings: dict[str, Any], params: Mapping[str, Any], taken: Collection[str]
    ) -> str:
        """Add a deployment and return its upstream. taken: names of all upstreams. Raises: NotServed."""
        if _base_name(served) != self._served:
            raise NotServed("another entry of this name has another model")
        part = _number(params.get("weight")), _whole(params.get("order"))
        for name, known in self._settings.items():
            if part == self._parts[name] and _without_replicas(known) == _without_replicas(settings):
                replicas = [*known.get("replicas", ()), *settings.get("replicas", ())]
                known["replicas"] = list(dict.fromkeys(replicas))
                return name
        name, number = self._first, 1
        while name in taken:
            number += 1
            name = f"{self._first}-{number}"
        self._settings[name], self._parts[name] = settings, part
        return name

    def model(self) -> dict[str, Any]:
        """Return the model of the name, as in router.yaml."""
        if len(self._settings) == 1:
            return {"upstream": next(iter(self._settings))}
        is_whole = all(weight is None or weight.is_integer() for weight, _ in self._parts.values())
        scale = 1 if is_whole else WEIGHT_SCALE
        members = []
        for name, (weight, order) in self._parts.items():
            # Without weights, calls are spread over all deployments alike.
            share = len(self._settings[name].get("replicas", ())) or 1 if weight is None else weight
            member = {"name": name, "weight": max(1, round(share * scale))}
            members.append(member if order is None else member | {"priority": order})
        return {"upstreams": members}


def _base_name(served: str) -> str:
    """Return a model's name without provider and organization, which differ between providers."""
    return served.rpartition("/")[2].lower()


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if is_number else None  # type: ignore[arg-type]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _without_replicas(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "replicas"}
