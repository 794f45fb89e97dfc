"""Resolution of public model names to upstreams. Pure: config and upstreams' operations are arguments."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

import msgspec

from backends.contract import Operation, Truncate
from gateway.config import schema as config
from gateway.config.money import token_price
from gateway.errors import InvalidInput, ModelForbidden, ModelNotFound, NoReplica, OperationUnsupported
from gateway.quotas.limits import FREE, Limit, Price, parse_limit
from gateway.tenants.keyring import Tenant, model_scope

# Names are compared with at most this many, and only short ones: a wrong name must cost little.
SUGGESTIONS_FROM = 200
# Models that an error names, where none is similar to the one that was asked for.
NAMED_MAX = 5
SUGGESTED_CHARACTERS_MAX = 64

MEDIA_VERBS = {
    Operation.EMBED_IMAGE: "embed images",
    Operation.EMBED_AUDIO: "embed sound",
    Operation.RERANK_IMAGE: "rank images",
}
# Status of what would serve a model that is not served now; None if nothing would.
StatusOf = Callable[[str], str | None]
# A model's name → its operations; None while no replica of it has joined.
OperationsOf = Callable[[str], frozenset[Operation] | None]


class Route(msgspec.Struct, frozen=True):
    """Resolved model name: the upstream that serves it, and the model's own options.

    limits: those of this tenant for this model, in addition to its limits for all models. prompts: name →
    text. cache: its vectors are cached. price: at which a call is reserved and settled. input_tokens:
    length of the model; an upstream's own may be more.
    """

    model: str
    upstream: str
    operation: Operation
    truncate: Truncate | None
    deadline_s: float
    limits: tuple[Limit, ...] = ()
    prompts: dict[str, str] = {}
    cache: bool = False
    price: Price = FREE
    input_tokens: int | None = None


class Routes:
    """Table of all public model names.

    added: models that operators have added. They take no request that specifies no model, or an unknown one,
    from the models of router.yaml: an admin key must not redirect the callers of these. status_of: of what
    would serve a model that is absent. currency: of the prices.
    """

    currency = ""

    def __init__(
        self,
        models: Mapping[str, config.ModelSettings],
        defaults: config.Defaults,
        operations_of: OperationsOf,
        added: Collection[str] = (),
        status_of: StatusOf = lambda _: None,
    ) -> None:
        self._models = models
        self._of_file = tuple(name for name in models if name not in added)
        # Of each tenant's use of a model.
        self.limits = {
            name: tuple(
                parse_limit(limit, amount, model_scope(name)) for limit, amount in model.limits.items()
            )
            for name, model in models.items()
        }
        self._prices = {
            name: token_price(model.price_per_million_tokens or 0) for name, model in models.items()
        }
        # Of any model: the body of a request is not read yet when this is asked for.
        self.least_price = min(self._prices.values(), default=0)
        self._defaults = defaults
        self._operations_of = operations_of
        self._status_of = status_of

    @property
    def has_limits(self) -> bool:
        """True if a model has limits for those who use it."""
        return any(self.limits.values())

    def resolve(self, tenant: Tenant, name: str | None, operation: Operation) -> Route:
        """Return the route for a name, or for the operation's default model without one.

        Raises: ModelNotFound, NoReplica, ModelForbidden, OperationUnsupported, InvalidInput.
        """
        model_name = self.default_model(operation, tenant) if name is None else name
        model = self._models.get(model_name)
        if model is None:
            model_name = self.known_name(model_name, tenant)
            model = self._models[model_name]
        if not tenant.may_use(model_name):
            raise ModelForbidden(f"this key may not use the model {model_name!r}", param="model")
        if not self._offers(model_name, operation):
            raise OperationUnsupported(
                f"the model {model_name!r} does not {MEDIA_VERBS.get(operation, operation)}", param="model"
            )
        return Route(
            model=model_name,
            upstream=model.upstream,
            operation=operation,
            truncate=Truncate(model.truncate) if model.truncate else None,
            deadline_s=model.deadline_s,
            limits=tenant.model_limits.get(model_name, self.limits[model_name]),
            prompts=model.prompts,
            cache=model.cache,
            price=Price(self._prices[model_name], self.currency),
        )

    def names(self, tenant: Tenant) -> list[str]:
        """Return the models that a tenant may use, in the config's order."""
        return [name for name in self._models if tenant.may_use(name)]

    def all_names(self) -> list[str]:
        """Return all models, in the config's order."""
        return list(self._models)

    def is_cached(self, name: str) -> bool:
        """Return whether a model's vectors are cached."""
        return self._models[name].cache

    def operations(self, name: str) -> list[Operation]:
        """Return the operations of a model, as far as they are known now."""
        return [operation for operation in Operation if self._offers(name, operation)]

    def defaults_of(self, name: str, tenant: Tenant) -> list[str]:
        """Return the keys of `defaults` that select a model, those of the tenant's key in place of others."""
        selected = msgspec.structs.asdict(self._defaults)
        of_gateway = [key for key in ("embed", "rerank", "classify") if key not in tenant.defaults]
        of_key = [key for key, model in tenant.defaults.items() if model == name]
        return [key for key in of_gateway if selected[key] == name] + of_key

    def upstream_of(self, name: str) -> str:
        """Return the upstream that serves a public name; of several, the main one.

        Raises: ModelNotFound.
        """
        return self._models[self.known_name(name)].upstream

    def root_model(self, tenant: Tenant | None = None) -> str:
        """Return the model of a root path that specifies no model and implies no operation.

        tenant: whose key may have one of its own. Raises: InvalidInput.
        """
        if tenant is not None and (own := tenant.default_model(Operation.EMBED)) is not None:
            return own
        only = self._only_model()
        if self._defaults.embed is None and only is not None:
            return only
        return self.default_model(Operation.EMBED, tenant)

    def default_model(self, operation: Operation, tenant: Tenant | None = None) -> str:
        """Return the model of a request that specifies none: that of its key, else that of the gateway.

        A tenant that may not use the gateway's has the only one that it may use. None stands for all tenants.
        Raises: InvalidInput, OperationUnsupported.
        """
        if tenant is not None and (own := tenant.default_model(operation)) is not None:
            return own
        defaults = self._defaults
        special = {
            Operation.RERANK: ("rerank", defaults.rerank),
            Operation.RERANK_IMAGE: ("rerank", defaults.rerank),
            Operation.CLASSIFY: ("classify", defaults.classify),
        }
        field, preferred = special.get(operation, ("embed", defaults.embed))
        if preferred is not None and (tenant is None or tenant.may_use(preferred)):
            return preferred
        capable = self._capable(self._of_file, operation) or self._capable(self._models, operation)
        if tenant is not None:
            capable = [name for name in capable if tenant.may_use(name)] or capable
        if operation is Operation.CLASSIFY:
            # A reranker returns its one label, but a request without a model is more likely for a classifier.
            capable = [name for name in capable if not self._scores_pairs(name)] or capable
        if len(capable) == 1:
            return capable[0]
        if preferred is not None:
            # The error names it.
            return preferred
        if not capable:
            verb = MEDIA_VERBS.get(operation)
            raise OperationUnsupported(
                f"no model here can {verb}" if verb else f"no model here does {operation}", param="model"
            )
        raise InvalidInput(
            f"name a model: this gateway serves several, and its config sets no `defaults.{field}`",
            param="model",
        )

    def known_name(self, name: str, tenant: Tenant | None = None) -> str:
        """Return the name of the model that serves a request for a name.

        tenant: whose models the error may suggest; None suggests none. Raises: ModelNotFound, NoReplica.
        """
        if name in self._models:
            return name
        only = self._only_model()
        if self._defaults.any_name and only is not None:
            return only
        names = [] if tenant is None else self.names(tenant)
        status = self._status_of(name)
        if status is not None and (tenant is None or tenant.may_use(name)):
            raise NoReplica(f"the instance of the model {name!r} is {status}, not running")
        hint = _suggestion(name, names) or _offer(names)
        failure = ModelNotFound(f"there is no model {name!r} here{hint}", param="model")
        # For the log, where the name is no label and cut.
        failure.reason = name[:SUGGESTED_CHARACTERS_MAX].encode(errors="replace").decode()
        raise failure

    def _only_model(self) -> str | None:
        """Return the only model of the file, or of all models if the file has none; None if several."""
        names = self._of_file or tuple(self._models)
        return names[0] if len(names) == 1 else None

    def _capable(self, names: Iterable[str], operation: Operation) -> list[str]:
        return [name for name in names if self._offers(name, operation)]

    def _scores_pairs(self, name: str) -> bool:
        operations = self._operations_of(name)
        return operations is not None and Operation.RERANK in operations

    def _offers(self, name: str, operation: Operation) -> bool:
        model, operations = self._models[name], self._operations_of(name)
        if operations is None:
            # No replica has joined yet; the one that does decides.
            return True
        if operation is Operation.RERANK:
            ranks_pairs = Operation.RERANK in operations
            return ranks_pairs or (model.rerank and Operation.EMBED in operations)
        if operation is Operation.RERANK_IMAGE:
            return operation in operations or (model.rerank and Operation.EMBED_IMAGE in operations)
        return operation in operations


def _offer(names: Sequence[str]) -> str:
    """Return the end of a sentence that names some models, or nothing."""
    if not names:
        return ""
    more = "" if len(names) <= NAMED_MAX else f" and {len(names) - NAMED_MAX} more: GET /v1/models"
    return f"; this key may use {', '.join(names[:NAMED_MAX])}{more}"


def _suggestion(name: str, names: Sequence[str]) -> str:
    """Return the end of a sentence that names the most similar model, or nothing."""
    if len(name) > SUGGESTED_CHARACTERS_MAX:
        return ""
    by_lower = {known.lower(): known for known in names[:SUGGESTIONS_FROM]}
    similar = get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[similar[0]]!r}?" if similar else ""
