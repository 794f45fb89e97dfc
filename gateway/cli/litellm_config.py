"""router.yaml from a config.yaml of LiteLLM. Pure.

Whatever cannot be carried over is reported with the reason: nothing is left out in silence. Keys never reach
the result: they become references to variables of the environment.
"""

import argparse
import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec.yaml
from rich.markup import escape

from backends.azure.kind import AZURE as AZURE_KIND
from backends.contract import ServerKind
from backends.kinds import KINDS
from backends.openai.kind import OPENAI
from gateway.cli.output import CleanConsole, write_document
from gateway.config.money import TOKENS_OF_PRICE, token_price

HEADING = "# Written by `gateway import litellm`; docs/configuration.md describes all keys.\n"
LISTEN = "0.0.0.0:4000"
REFERENCE = "os.environ/"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A user or password in front of a host.
SECRET_ADDRESS = re.compile(r"^[^/?#]*//[^/?#]*@")
POLICIES = {"least-busy": "least_tokens", "simple-shuffle": "round_robin"}
MODES = {"embedding", "rerank"}
# Names by which models without a `mode` are taken for models that embed or rank.
SPECIALIZED = re.compile(r"embed|rerank|bge|gte|e5|minilm|mpnet|nomic|colbert|splade|arctic|jina")
INPUT_COST = "input_cost_per_token"
# LiteLLM states costs in this currency.
CURRENCY = "USD"
PRICE = "price_per_million_tokens"
# Settings that are read, by section.
READ = {
    "litellm_params": {
        "model",
        "api_base",
        "base_url",
        "api_key",
        "api_version",
        "timeout",
        "weight",
        "order",
        INPUT_COST,
    },
    "router_settings": {"routing_strategy", "redis_url", "redis_host", "redis_port", "redis_password"},
    "general_settings": {"master_key"},
    "litellm_settings": {"request_timeout"},
}
CALLBACKS = "see docs/metrics.md and docs/tracing.md"
REASONS = {
    "rpm": "windows are learned; `in_flight_batches` fixes one",
    "tpm": "windows are learned; `models.<name>.limits` limits each tenant",
    "max_parallel_requests": "windows are learned; `in_flight_batches` fixes one",
    "dimensions": "callers ask for `dimensions` themselves",
    "max_budget": "a tenant or a key has it: `budget_per_month` or `budget_per_day` in its `limits`",
    "budget_duration": "a budget is for a calendar month or day (UTC)",
    "provider_budget_config": "`budget_per_month` in `models.<name>.limits` limits each tenant",
    "fallbacks": "vectors of another model would be silently wrong",
    "num_retries": "`retry_share` and the deadline bound the retries",
    "database_url": "keys, tenants and usage are stored in Redis",
    "cache": "set `cache` and `models.<name>.cache`",
    "success_callback": CALLBACKS,
    "failure_callback": CALLBACKS,
    "callbacks": CALLBACKS,
    "allowed_fails": "a replica that fails is probed until it is healthy",
    "cooldown_time": "a replica that fails is probed until it is healthy",
}
NO_COUNTERPART = "it has no counterpart"
MASTER_KEY_WARNING = (
    "admin.keys has the SHA-256 of LiteLLM's master key, from which a chosen key can be "
    "guessed: keep the file private, and use a random key"
)
AZURE, AZURE_VERSION = "azure", "2024-10-21"
# A part of a whole, as LiteLLM allows for weights, becomes a whole number.
WEIGHT_SCALE = 100
# As many hexadecimal digits as make 80 bits, and letters of which they have more with near certainty.
RANDOM_LENGTH, RANDOM_LETTERS = 20, 8

Found = TypeVar("Found")
Params: TypeAlias = Mapping[str, Any]


class Unreadable(Exception):
    """A file that is no configuration of LiteLLM, or has nothing for this gateway. For a person."""


class NotServed(Exception):
    """A provider whose API no backend speaks, or an entry without an address."""


class Imported(NamedTuple):
    """Text of a router.yaml, what was left out with its reason, and the variables that it needs.

    warnings: what an operator should know of the text.
    """

    text: str
    left_out: list[str]
    variables: list[str]
    warnings: list[str]


class References:
    """Names of the variables that the result refers to, in order."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def to(self, value: object, variable: str, form: str = "") -> str:
        """Return a reference to LiteLLM's own variable, or to this one in place of a value in the file.

        form: of the placeholder. Raises: NotServed if LiteLLM's has a name that no variable can have.
        """
        name = str(value).removeprefix(REFERENCE) if is_reference(value) else variable
        if not VARIABLE.fullmatch(name):
            raise NotServed(f"{REFERENCE}{name} names no variable")
        self.names[name] = None
        return f"${{{form}{name}}}"

    def resolved(self, value: object) -> str:
        """Return a value that is no secret, with a reference where LiteLLM has one. Raises: NotServed."""
        return self.to(value, "") if is_reference(value) else literal(value)


class Deployments:
    """Deployments of one name as upstreams of one model. upstream: name of the first one. served: the model.

    Equal deployments are the replicas of one upstream. Others become upstreams of their own, with their
    weights and orders, if they serve the same model: the gateway compares their vectors before it uses them
    together.
    """

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


class Models:
    """Models and their upstreams, gathered entry by entry."""

    def __init__(self, references: References) -> None:
        self.left_out: list[str] = []
        self.upstreams: dict[str, dict[str, Any]] = {}
        self.by_name: dict[str, dict[str, Any]] = {}
        self._references = references
        self._deployments: dict[str, Deployments] = {}

    def add(self, index: int, entry: Mapping[str, Any]) -> None:
        """Carry over one entry of `model_list`, or report why not."""
        params, place = section_of(entry, "litellm_params"), f"model_list[{index}]"
        try:
            name, kind = text_of(entry.get("model_name")), text_of(params.get("model"))
            place = f"{place} ({name})"
            _check(name, kind, section_of(entry, "model_info").get("mode"))
            served = str(section_of(entry, "model_info").get("base_model") or kind)
            settings = self._settings(place, name, kind, params)
            price = self._price(place, params, section_of(entry, "model_info"))
            _check_price(price, self.by_name.get(name))
            self._join(name, served, settings, params)
            if price is not None:
                self.by_name[name][PRICE] = price
        except NotServed as error:
            self.left_out.append(f"{place}: {error}")
            return
        plain = {key: value for key, value in params.items() if "cost_per" not in key}
        self.left_out += unread(plain, "litellm_params", f"{place}.litellm_params")

    def _settings(self, place: str, name: str, kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the upstream of one entry. Raises: NotServed."""
        provider, _, model = kind.partition("/") if "/" in kind else (OPENAI.name, "/", kind)
        base, key = params.get("api_base") or params.get("base_url"), params.get("api_key")
        address = self._references.resolved(base) if base else None
        if address is not None and SECRET_ADDRESS.match(address):
            raise NotServed(
                "its `api_base` has a user or password, which belongs into `api_key` or `headers`"
            )
        version = params.get("api_version")
        params = {**params, "api_version": self._references.resolved(version) if version else None}
        settings, variable = upstream_of(provider, literal(model), address, params)
        if key and not is_reference(key):
            variable = f"{re.sub(r'[^A-Z0-9]+', '_', name.upper()).strip('_')}_API_KEY"
            variable = variable if VARIABLE.fullmatch(variable) else f"MODEL_{variable}"
            self.left_out.append(f"{place}.api_key: keys are not written here; set {variable}")
        if key or variable is not None:
            settings["api_key"] = self._references.to(key, variable or "")
        if (timeout_s := params.get("timeout")) is not None:
            if is_duration(timeout_s):
                settings["attempt_timeout_s"] = timeout_s
            else:
                self.left_out.append(f"{place}.litellm_params.timeout: it is no positive number of seconds")
        return settings

    def _price(self, place: str, params: Mapping[str, Any], info: Mapping[str, Any]) -> float | None:
        """Return the price of a million input tokens, None without one. What is not exact is reported."""
        for section, content in (("litellm_params", params), ("model_info", info)):
            self.left_out += [
                f"{place}.{section}.{key}: only tokens of inputs have a price"
                for key, cost in content.items()
                if "cost_per" in key and key != INPUT_COST and cost
            ]
        cost = params.get(INPUT_COST, info.get(INPUT_COST))
        try:
            price = None if cost is None else float(Decimal(str(cost)) * TOKENS_OF_PRICE)
            token_price(price or 0)
        except (ArithmeticError, ValueError) as error:
            self.left_out.append(
                f"{place}.{INPUT_COST}: {cost} is no price that can be counted here: {error}"
            )
            return None
        return price

    def _join(self, name: str, served: str, settings: dict[str, Any], params: Mapping[str, Any]) -> None:
        """Add a deployment to those of its name. served: the model that it serves. Raises: NotServed."""
        deployments = self._deployments.get(name)
        if deployments is None:
            upstream = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "model"
            deployments = self._deployments[name] = Deployments(upstream, served)
        upstream = deployments.add(served, settings, params, self.upstreams)
        self.upstreams.setdefault(upstream, settings)
        self.by_name[name] = deployments.model()


def import_litellm(text: str) -> Imported:
    """Return the router.yaml of a configuration of LiteLLM. Raises: Unreadable."""
    config, references = _parsed(text), References()
    models = Models(references)
    for index, entry in enumerate(config["model_list"]):
        if isinstance(entry, dict):
            models.add(index, entry)
        else:
            models.left_out.append(f"model_list[{index}]: it is no mapping")
    if not models.by_name:
        raise Unreadable("\n".join(["it has no model that can be served here", *models.left_out]))
    router = section_of(config, "router_settings")
    left_out = [*models.left_out, *_set_for_all(models.upstreams.values(), config)]
    written: dict[str, Any] = {"listen": LISTEN}
    if store := _or_left_out(partial(_store, router, references), "router_settings.redis", left_out):
        written["quotas"] = {"store": store}
    if any(PRICE in model for model in models.by_name.values()):
        written["currency"] = CURRENCY
    written |= {"upstreams": models.upstreams, "models": models.by_name}
    master_key = partial(_master_key, section_of(config, "general_settings").get("master_key"), references)
    if key := _or_left_out(master_key, "general_settings.master_key", left_out):
        written["admin"] = {"keys": [key]}
    for name in config.keys() - {"model_list"}:
        left_out += unread(config[name], name, name)
    text = HEADING + msgspec.yaml.encode(written).decode()
    return Imported(text, sorted(left_out), list(references.names), [MASTER_KEY_WARNING] if key else [])


def is_reference(value: object) -> bool:
    """Return whether a value refers to a variable of the environment."""
    return isinstance(value, str) and value.startswith(REFERENCE)


def text_of(value: object) -> str:
    """Return a value of YAML as text, empty for null. Raises: NotServed for a list or a mapping."""
    if isinstance(value, dict | list):
        # Its text may be endless where aliases repeat it.
        raise NotServed("a list or a mapping is where a text belongs")
    return "" if value is None else str(value)


def looks_random(key: str) -> bool:
    """Return whether a key is no chosen word: it is long, and its letters and digits hardly repeat."""
    rest = key.removeprefix("sk-")
    kinds = any(letter.isalpha() for letter in rest) and any(letter.isdigit() for letter in rest)
    return kinds and len(rest) >= RANDOM_LENGTH and len(set(rest)) >= RANDOM_LETTERS


def literal(value: object) -> str:
    """Return a text that router.yaml does not take for a placeholder. Raises: NotServed."""
    return text_of(value).replace("${", "$${")


def is_duration(value: object) -> bool:
    """Return whether a value is a number of seconds that a timeout can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section, empty if there is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def unread(content: Any, section: str, place: str) -> Iterator[str]:
    """Yield what is left out of a section, with the reason."""
    if section not in READ or not isinstance(content, dict):
        yield f"{place}: {NO_COUNTERPART}"
        return
    for key in content.keys() - READ[section]:
        yield f"{place}.{key}: {REASONS.get(key, NO_COUNTERPART)}"


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = msgspec.yaml.decode(text)
    except msgspec.DecodeError as error:
        raise Unreadable(f"it is no YAML: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_list"), list):
        raise Unreadable("it has no `model_list`")
    return config


def _check(name: str, kind: str, mode: object) -> None:
    """Check that an entry is one model that embeds or ranks. Raises: NotServed."""
    if not name or not kind or "*" in name + kind:
        raise NotServed("it names no model, or a pattern; list each model")
    if (not isinstance(mode, str) or mode not in MODES) and (
        mode is not None or not SPECIALIZED.search(f"{name} {kind}".lower())
    ):
        raise NotServed("it neither embeds nor ranks, by its mode or its name")


def _check_price(price: float | None, known: Mapping[str, Any] | None) -> None:
    """Check that a further entry of a name has its price. known: the model so far. Raises: NotServed."""
    if known is not None and price != known.get(PRICE):
        raise NotServed("another entry of this name has another price, and calls of one name have one")


def _or_left_out(read: Callable[[], Found | None], place: str, left_out: list[str]) -> Found | None:
    """Return a setting, None if it is not given or unusable, which is reported."""
    try:
        return read()
    except NotServed as error:
        left_out.append(f"{place}: {error}")
        return None


def _set_for_all(upstreams: Any, config: Mapping[str, Any]) -> Iterator[str]:
    """Set policy and timeout of all upstreams; yield what is left out."""
    strategy = section_of(config, "router_settings").get("routing_strategy")
    policy = POLICIES.get(strategy) if isinstance(strategy, str) else None
    if strategy is not None and policy is None:
        named = strategy if isinstance(strategy, str) else "of that kind"
        yield f"router_settings.routing_strategy: no `policy` is {named}"
    timeout_s = section_of(config, "litellm_settings").get("request_timeout")
    if timeout_s is not None and not is_duration(timeout_s):
        yield "litellm_settings.request_timeout: it is no positive number of seconds"
    for settings in upstreams:
        if policy is not None and len(settings.get("replicas", ())) > 1:
            settings["policy"] = policy
        if is_duration(timeout_s):
            settings.setdefault("attempt_timeout_s", timeout_s)


def _store(settings: Mapping[str, Any], references: References) -> str | None:
    """Return the address of Redis, None without one. Raises: NotServed."""
    if url := settings.get("redis_url"):
        # It may contain a password.
        return references.to(url, "REDIS_URL") if is_reference(url) or "@" in text_of(url) else literal(url)
    if not (host := settings.get("redis_host")):
        return None
    place = f"{references.resolved(host)}:{references.resolved(settings.get('redis_port', 6379))}/0"
    if not (password := settings.get("redis_password")):
        return f"redis://{place}"
    # LiteLLM's password is none of a URL.
    return f"redis://:{references.to(password, 'REDIS_PASSWORD', 'url:')}@{place}"


def _master_key(key: object, references: References) -> dict[str, Any] | None:
    """Return the operators' key of LiteLLM's master key, by its digest. Raises: NotServed."""
    if not key:
        return None
    if is_reference(key):
        digest = references.to(f"{key}_SHA256", "")
    elif looks_random(text_of(key)):
        digest = hashlib.sha256(text_of(key).encode()).hexdigest()
    else:
        raise NotServed(
            "it does not look random, and a chosen key can be guessed from its digest; "
            "`gateway keys create TENANT --scope admin` makes another"
        )
    return {
        "digest": f"sha256:{digest}",
        "scopes": ["embed", "rerank", "classify", "tokenize", "metrics", "admin"],
    }


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


class Provided(NamedTuple):
    """Settings of an upstream, and the variable from which LiteLLM takes a key that is not written."""

    settings: dict[str, Any]
    key_variable: str | None


def upstream_of(provider: str, model: str, base: str | None, params: Params) -> Provided:
    """Return the upstream of a provider's model. base: `api_base`. Raises: NotServed."""
    open_provider = OPENERS.get(provider)
    if open_provider is None:
        raise NotServed(f"no backend speaks the API of {provider!r}")
    return open_provider(provider, model, base, params)


def _azure(_: str, model: str, base: str | None, params: Params) -> Provided:
    if base is None:
        raise NotServed("it has no `api_base`")
    version = params.get("api_version") or AZURE_VERSION
    settings = {
        "backend": AZURE_KIND.name,
        "model": model,
        "replicas": [base.rstrip("/")],
        "azure": {"api_version": version},
    }
    return Provided(settings, "AZURE_API_KEY")


def _served(kind: ServerKind, provider: str, model: str, base: str | None, _: Params) -> Provided:
    known = kind.litellm[provider]
    address = base or known.address
    if address is None and kind.address is None:
        raise NotServed("it has no `api_base`")
    settings: dict[str, Any] = {"backend": kind.name}
    if kind.is_multiple:
        settings["model"] = model
    if address is not None:
        settings["replicas"] = [address.removesuffix(known.suffix)]
    if kind.needs_tokenizer:
        settings["tokenizer"] = model
    return Provided(settings, known.key_variable)


OPENERS: dict[str, Callable[[str, str, str | None, Params], Provided]] = {
    AZURE: _azure,
    **{name: partial(_served, kind) for kind in KINDS.values() for name in kind.litellm},
}


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Add the sources of `gateway import` and their options to its parser."""
    sources = parser.add_subparsers(dest="source", required=True, metavar="source")
    litellm = sources.add_parser("litellm", help="a config.yaml of LiteLLM's proxy")
    litellm.add_argument("file", type=Path, help="the config.yaml")
    litellm.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write; it must not exist (default: print)"
    )


def import_config(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print or write the configuration; report what it leaves out; return 1 if there is none."""
    errors = CleanConsole(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    try:
        found = import_litellm(options.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, Unreadable) as error:
        errors.print(f"[red]{escape(str(options.file))}[/]: {escape(str(error))}")
        return 1
    if options.output is None:
        write_document(found.text)
    else:
        try:
            _write(options.output, found.text)
        except OSError as error:
            errors.print(f"[red]{escape(str(options.output))}[/]: {escape(error.strerror or str(error))}")
            return 1
    for line in found.left_out:
        errors.print(f"left out  {escape(line)}")
    for line in found.warnings:
        errors.print(f"note  {escape(line)}")
    missing = [name for name in found.variables if name not in environment]
    if missing:
        errors.print(f"set before the start: {escape(', '.join(missing))}")
    for name in (name for name in missing if name.endswith("_SHA256")):
        key = name.removesuffix("_SHA256")
        errors.print(escape(f'  export {name}="$(printf %s "${key}" | sha256sum | cut -d " " -f 1)"'))
    return 0


def _write(path: Path, text: str) -> None:
    """Write a new file, with digests of keys, that only this user can read. Raises: OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
