"""What a caller means by a model's name. Pure: the config and what upstreams told are arguments."""

from collections.abc import Callable, Mapping

import msgspec

from backends.contract import Operation, Truncate
from gateway.config import schema as config
from gateway.errors import InvalidInput, ModelForbidden, ModelNotFound, OperationUnsupported
from gateway.quotas.limits import Limit, parse_limit
from gateway.tenants.keyring import Tenant, model_scope

# What an upstream can do, by its name; None while no replica of it has joined.
Offered = Callable[[str], frozenset[Operation] | None]


class Route(msgspec.Struct, frozen=True):
    """A public model name, settled: which upstream serves it, and the model's own options.

    limits: of this tenant for this model, beside those for all models. prompts: name → text.
    """

    model: str
    upstream: str
    operation: Operation
    truncate: Truncate
    deadline_s: float
    limits: tuple[Limit, ...] = ()
    prompts: Mapping[str, str] = {}


class Routes:
    """All public names."""

    def __init__(
        self, models: Mapping[str, config.Model], defaults: config.Defaults, offered: Offered
    ) -> None:
        self._models = models
        self._limits = {
            name: tuple(parse_limit(limit, amount, model_scope(name)) for limit, amount in one.limits.items())
            for name, one in models.items()
        }
        self._defaults = defaults
        self._offered = offered

    def resolve(self, tenant: Tenant, name: str | None, operation: Operation) -> Route:
        """The route for a name, or for none.

        Raises: ModelNotFound, ModelForbidden, OperationUnsupported, InvalidInput.
        """
        chosen = name if name is not None else self.default(operation)
        model = self._models.get(chosen)
        if model is None:
            raise ModelNotFound(f"there is no model {chosen!r} here", param="model")
        if not tenant.may_use(chosen):
            raise ModelForbidden(f"this key may not use the model {chosen!r}", param="model")
        if not self._offers(model, operation):
            raise OperationUnsupported(f"the model {chosen!r} does not {operation}", param="model")
        return Route(
            model=chosen,
            upstream=model.upstream,
            operation=operation,
            truncate=Truncate(model.truncate),
            deadline_s=model.deadline_s,
            limits=tenant.model_limits.get(chosen, self._limits[chosen]),
            prompts=model.prompts,
        )

    def names(self, tenant: Tenant) -> list[str]:
        """The models that a tenant may use, in the config's order."""
        return [name for name in self._models if tenant.may_use(name)]

    def every_name(self) -> list[str]:
        """All models, in the config's order."""
        return list(self._models)

    def operations(self, name: str) -> list[Operation]:
        """What a model can be asked, as far as is known now."""
        return [one for one in Operation if self._offers(self._models[name], one)]

    def upstream_of(self, name: str) -> str:
        """Which upstream serves a public name.

        Raises: ModelNotFound.
        """
        if name not in self._models:
            raise ModelNotFound(f"there is no model {name!r} here", param="model")
        return self._models[name].upstream

    def speaker(self) -> str:
        """The model that root paths speak of when they name none and ask for no operation.

        Raises: InvalidInput.
        """
        if self._defaults.embed is None and len(self._models) == 1:
            return next(iter(self._models))
        return self.default(Operation.EMBED)

    def default(self, operation: Operation) -> str:
        """The model of a request that names none.

        Raises: InvalidInput, OperationUnsupported.
        """
        defaults = self._defaults
        own = {
            Operation.RERANK: ("rerank", defaults.rerank),
            Operation.CLASSIFY: ("classify", defaults.classify),
        }
        field, preferred = own.get(operation, ("embed", defaults.embed))
        if preferred is not None:
            return preferred
        able = [name for name, model in self._models.items() if self._offers(model, operation)]
        if len(able) == 1:
            return able[0]
        if not able:
            raise OperationUnsupported(f"no model here does {operation}", param="model")
        raise InvalidInput(
            f"name a model: this gateway serves several, and its config sets no `defaults.{field}`",
            param="model",
        )

    def _offers(self, model: config.Model, operation: Operation) -> bool:
        offered = self._offered(model.upstream)
        if offered is None:
            return True  # Nobody knows yet; the replica will say.
        if operation is Operation.RERANK:
            own = Operation.RERANK in offered
            return own or (model.rerank and Operation.EMBED in offered)
        return operation in offered
