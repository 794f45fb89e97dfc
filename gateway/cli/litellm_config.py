"""router.yaml from a config.yaml of LiteLLM. Pure.

Whatever cannot be carried over is reported with the reason: nothing is left out in silence. Keys never reach
the result: they become references to variables of the environment.
"""

import argparse
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec.yaml
from rich.markup import escape

from backends.openai.kind import OPENAI
from gateway.cli.litellm_providers import (
    VARIABLE,
    Entry,
    NotServed,
    References,
    is_reference,
    literal,
    text_of,
    upstream_of,
    without_secret,
)
from gateway.cli.output import CleanConsole, write_document
from gateway.config.money import TOKENS_OF_PRICE, token_price
from gateway.config.state_folder import create_private

HEADING = "# Written by `gateway import litellm`; docs/configuration.md describes all keys.\n"
LISTEN = "0.0.0.0:4000"
POLICIES = {"least-busy": "least_tokens", "simple-shuffle": "round_robin"}
MODES = {"embedding", "rerank"}
# Names by which models without a `mode` are taken for models that embed or rank.
RANKS = re.compile(r"rerank|ranker")
SPECIALIZED = re.compile(
    rf"{RANKS.pattern}|embed|bge|gte|e5|minilm|mpnet|nomic|colbert|splade|arctic|jina|rtrvr"
)
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
# A part of a whole, as LiteLLM allows for weights, becomes a whole number.
WEIGHT_SCALE = 100
# As many hexadecimal digits as make 80 bits, and letters of which they have more with near certainty.
RANDOM_LENGTH, RANDOM_LETTERS = 20, 8

Found = TypeVar("Found")


class Unreadable(Exception):
    """A file that is no configuration of LiteLLM, or has nothing for this gateway. For a person."""


class Imported(NamedTuple):
    """Text of a router.yaml, what was left out with its reason, and the variables that it needs.

    warnings: what an operator should know of the text.
    """

    text: str
    left_out: list[str]
    variables: list[str]
    warnings: list[str]


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
        self.warnings: list[str] = []
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
            reranks = _reranks(name, kind, section_of(entry, "model_info").get("mode"))
            settings, read = self._settings(place, name, kind, params, reranks=reranks)
            price = self._price(place, params, section_of(entry, "model_info"))
            _check_price(price, self.by_name.get(name))
            self._join(name, served, settings, params)
            if price is not None:
                self.by_name[name][PRICE] = price
        except NotServed as error:
            self.left_out.append(f"{place}: {error}")
            return
        plain = {key: value for key, value in params.items() if "cost_per" not in key and key not in read}
        self.left_out += unread(plain, "litellm_params", f"{place}.litellm_params")

    def _settings(
        self, place: str, name: str, kind: str, params: Mapping[str, Any], *, reranks: bool
    ) -> tuple[dict[str, Any], Collection[str]]:
        """Return the upstream of one entry, and the names that only its provider has. Raises: NotServed."""
        provider, _, model = kind.partition("/") if "/" in kind else (OPENAI.name, "/", kind)
        base, key = params.get("api_base") or params.get("base_url"), params.get("api_key")
        address = without_secret(self._references.resolved(base)) if base else None
        entry = Entry(provider, literal(model), address, params, reranks, self._references)
        settings, variable, read, left_out, paths = upstream_of(entry)
        self.left_out += [f"{place}.litellm_params.{key}: {reason}" for key, reason in left_out.items()]
        self.warnings += [
            f"{each} has to be the path of a file with the credentials, not their text" for each in paths
        ]
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
        return settings, read

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
    warnings = [*models.warnings, *([MASTER_KEY_WARNING] if key else [])]
    return Imported(text, sorted(left_out), list(references.names), warnings)


def looks_random(key: str) -> bool:
    """Return whether a key is no chosen word: it is long, and its letters and digits hardly repeat."""
    rest = key.removeprefix("sk-")
    kinds = any(letter.isalpha() for letter in rest) and any(letter.isdigit() for letter in rest)
    return kinds and len(rest) >= RANDOM_LENGTH and len(set(rest)) >= RANDOM_LETTERS


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


def _reranks(name: str, kind: str, mode: object) -> bool:
    """Return whether an entry ranks, by its mode or its name."""
    return mode == "rerank" or (mode is None and RANKS.search(f"{name} {kind}".lower()) is not None)


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


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Add the sources of `gateway import` and their options to its parser."""
    sources = parser.add_subparsers(dest="source", required=True, metavar="source")
    litellm = sources.add_parser("litellm", help="a config.yaml of LiteLLM's proxy")
    litellm.add_argument("file", type=Path, help="the config.yaml")
    litellm.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write; it must not exist (default: print)"
    )


def run_import(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
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
            # It has digests of keys.
            create_private(options.output, found.text.encode())
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
