"""Upstreams of LiteLLM's providers: which settings of an entry become which of an upstream. Pure."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from backends.azure.kind import AZURE
from backends.bedrock.kind import BEDROCK, REGION
from backends.contract import ServerKind
from backends.google.kind import VERTEX
from backends.huggingface.kind import HUGGINGFACE
from backends.kinds import KINDS
from backends.nim.kind import EMBED_ADDRESS, NIM, RERANK_ADDRESS
from backends.tei.kind import TEI
from backends.watsonx.kind import WATSONX

REFERENCE = "os.environ/"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A user or password in front of a host.
SECRET_ADDRESS = re.compile(r"^[^/?#]*//[^/?#]*@")
AZURE_VERSION = "2024-10-21"
NO_ADDRESS = "it has no `api_base`"
NIM_ADDRESSES = (EMBED_ADDRESS, RERANK_ADDRESS)
# Each of them is the name of a variable, too.
AWS_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
ROLE = "a profile of AWS' files assumes a role: name it in `aws_profile_name`"
AWS_REFUSED = {
    "aws_role_name": ROLE,
    "aws_web_identity_token": ROLE,
    "aws_external_id": ROLE,
    "aws_sts_endpoint": ROLE,
}
VERTEX_REFUSED = {
    "api_key": "Vertex AI takes credentials, and no key",
    "api_base": "it is the address of one model; the address here follows from `vertex_location`",
    "base_url": "it is the address of one model; the address here follows from `vertex_location`",
}
WATSONX_REFUSED = {
    "token": "a token ends; write an `api_key`",
    "zen_api_key": "write it as `headers.authorization` of the upstream, behind the word ZenApiKey",
    "wx_credentials": "write `api_base` and `api_key`",
    "watsonx_credentials": "write `api_base` and `api_key`",
}
IN_FILE = "credentials are not written here; write them into a file, and its path into `vertex.credentials`"


class NotServed(Exception):
    """A provider whose API no backend speaks, or an entry without an address."""


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


class Entry(NamedTuple):
    """One deployment. model: its name without the provider. base: `api_base`. reranks: it ranks."""

    provider: str
    model: str
    base: str | None
    params: Mapping[str, Any]
    reranks: bool
    references: References

    def text(self, *names: str) -> str | None:
        """Return the first of some settings that is given, None without one. Raises: NotServed."""
        given = next((self.params[name] for name in names if self.params.get(name)), None)
        return None if given is None else self.references.resolved(given)

    def required(self, variable: str, *names: str) -> str:
        """Return the first of some settings, or a reference to LiteLLM's variable. Raises: NotServed."""
        return self.text(*names) or self.references.to("", variable)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Check that settings without which it would be another one are absent. Raises: NotServed."""
        for name, reason in reasons.items():
            if self.params.get(name):
                raise NotServed(f"its `{name}` cannot be carried over: {reason}")


class Provided(NamedTuple):
    """Settings of an upstream, and what else an entry says.

    key_variable: from which LiteLLM takes a key that is not written. read: names of the provider's settings
    that need no report. left_out: by name, why a setting was not carried over. paths: variables of files.
    """

    settings: dict[str, Any]
    key_variable: str | None
    read: Collection[str] = ()
    left_out: Mapping[str, str] = {}
    paths: Collection[str] = ()


def is_reference(value: object) -> bool:
    """Return whether a value refers to a variable of the environment."""
    return isinstance(value, str) and value.startswith(REFERENCE)


def text_of(value: object) -> str:
    """Return a value of YAML as text, empty for null. Raises: NotServed for a list or a mapping."""
    if isinstance(value, dict | list):
        # Its text may be endless where aliases repeat it.
        raise NotServed("a list or a mapping is where a text belongs")
    return "" if value is None else str(value)


def literal(value: object) -> str:
    """Return a text that router.yaml does not take for a placeholder. Raises: NotServed."""
    return text_of(value).replace("${", "$${")


def without_secret(address: str | None, name: str = "api_base") -> str | None:
    """Return an address that shows no secret. name: of its setting. Raises: NotServed."""
    if address is not None and SECRET_ADDRESS.match(address):
        raise NotServed(f"its `{name}` has a user or password, which belongs into `api_key` or `headers`")
    return address


def upstream_of(entry: Entry) -> Provided:
    """Return the upstream of a provider's model. Raises: NotServed."""
    open_provider = OPENERS.get(entry.provider)
    if open_provider is None:
        raise NotServed(f"no backend speaks the API of {entry.provider!r}")
    return open_provider(entry)


def _azure(entry: Entry) -> Provided:
    if entry.base is None:
        raise NotServed(NO_ADDRESS)
    settings = {
        "backend": AZURE.name,
        "model": entry.model,
        "replicas": [entry.base.rstrip("/")],
        "azure": {"api_version": entry.text("api_version") or AZURE_VERSION},
    }
    return Provided(settings, "AZURE_API_KEY", {"api_version"})


def _bedrock(entry: Entry) -> Provided:
    entry.refuse(AWS_REFUSED)
    region, model = _place_of(entry.model)
    section: dict[str, str] = {}
    if (profile := entry.text("model_id")) is not None:
        region, section["family"], model = _place_of(profile)[0] or region, model, profile
    endpoint = without_secret(entry.text("aws_bedrock_runtime_endpoint"), "aws_bedrock_runtime_endpoint")
    section["region"] = entry.text("aws_region_name") or region or entry.references.to("", "AWS_REGION_NAME")
    if (files := entry.text("aws_profile_name")) is not None:
        section["profile"] = files
    settings: dict[str, Any] = {"backend": BEDROCK.name, "model": model, BEDROCK.name: section}
    if address := entry.base or endpoint:
        settings["replicas"] = [address.rstrip("/")]
    left_out = {}
    for name in filter(entry.params.get, AWS_KEYS):
        variable = name.upper()
        entry.references.to("", variable)
        if entry.params[name] != REFERENCE + variable:
            left_out[name] = f"keys are not written here; set {variable}, or name a profile of AWS' files"
    read = {"aws_region_name", "aws_profile_name", "aws_bedrock_runtime_endpoint", "model_id", *AWS_KEYS}
    return Provided(settings, None, read, left_out)


def _place_of(model: str) -> tuple[str | None, str]:
    """Return the region in the name of a model of Bedrock, and its id. Raises: NotServed for other routes."""
    if model.startswith("arn:"):
        return [*model.split(":"), "", "", ""][3] or None, model
    place, slash, name = model.rpartition("/")
    if slash and not REGION.fullmatch(place):
        raise NotServed(f"no backend speaks the route {place!r} of Bedrock")
    return place or None, name


def _vertex(entry: Entry) -> Provided:
    entry.refuse(VERTEX_REFUSED)
    if entry.model.isdecimal():
        raise NotServed("it is an endpoint of an own model, whose API no backend speaks")
    section = {"project": entry.required("VERTEXAI_PROJECT", "vertex_project", "vertex_ai_project")}
    # The ranking API has no locations.
    if not entry.reranks:
        section["location"] = entry.required("VERTEXAI_LOCATION", "vertex_location", "vertex_ai_location")
    left_out, paths = {}, []
    for name in filter(entry.params.get, ("vertex_credentials", "vertex_ai_credentials")):
        written = entry.params[name]
        if isinstance(written, dict) or text_of(written).lstrip().startswith("{"):
            left_out[name] = IN_FILE
            continue
        section["credentials"] = entry.references.resolved(written)
        if is_reference(written):
            paths.append(str(written).removeprefix(REFERENCE))
    settings = {"backend": VERTEX.name, "model": entry.model, VERTEX.name: section}
    read = {
        f"vertex_{infix}{name}" for infix in ("", "ai_") for name in ("project", "location", "credentials")
    }
    return Provided(settings, None, read, left_out, paths)


def _huggingface(entry: Entry) -> Provided:
    """Return TEI at an address of its own, else the vendor's inference."""
    if entry.base is not None:
        return _served(TEI, entry)
    settings: dict[str, Any] = {"backend": HUGGINGFACE.name, "model": entry.model}
    if entry.reranks:
        settings[HUGGINGFACE.name] = {"task": "rerank"}
    return Provided(settings, "HUGGINGFACE_API_KEY")


def _nim(entry: Entry) -> Provided:
    route, _, name = entry.model.partition("/")
    # LiteLLM's name of a path; all of its paths for rankings have the model without dots.
    reranks, model = entry.reranks or route == "ranking", name if route == "ranking" else entry.model
    settings: dict[str, Any] = {"backend": NIM.name, "model": model.replace("_", ".") if reranks else model}
    if reranks:
        settings["task"] = "rerank"
    if entry.base is None or entry.base.startswith(NIM_ADDRESSES):
        settings[NIM.name] = {"hosted": True}
        return Provided(settings, "NVIDIA_NIM_API_KEY")
    settings["replicas"] = [entry.base.rstrip("/").removesuffix("/v1")]
    return Provided(settings, None)


def _watsonx(entry: Entry) -> Provided:
    entry.refuse(WATSONX_REFUSED)
    if entry.model.startswith("deployment/"):
        raise NotServed("no backend speaks the API of deployments of watsonx")
    region = entry.text("region_name", "watsonx_region_name")
    if entry.base is None and region is None:
        raise NotServed(NO_ADDRESS)
    section = {} if region is None else {"region": region}
    project, space = entry.text("project_id", "watsonx_project"), entry.text("space_id")
    if project is None and space is not None:
        section["space_id"] = space
    else:
        section["project_id"] = project or entry.references.to("", "WATSONX_PROJECT_ID")
    if (version := entry.text("api_version")) is not None:
        section["version"] = version
    settings: dict[str, Any] = {"backend": WATSONX.name, "model": entry.model, WATSONX.name: section}
    if entry.base is not None:
        settings["replicas"] = [entry.base.rstrip("/")]
    left_out = {"space_id": "`project_id` comes first"} if project and space else {}
    read = {"region_name", "watsonx_region_name", "project_id", "watsonx_project", "space_id", "api_version"}
    return Provided(settings, "WATSONX_APIKEY", read, left_out)


def _served(kind: ServerKind, entry: Entry) -> Provided:
    known = kind.litellm[entry.provider]
    address = entry.base or known.address
    if address is None and kind.address is None:
        raise NotServed(NO_ADDRESS)
    settings: dict[str, Any] = {"backend": kind.name}
    if kind.is_multiple:
        settings["model"] = entry.model
    if address is not None:
        settings["replicas"] = [address.removesuffix(known.suffix)]
    if kind.needs_tokenizer:
        settings["tokenizer"] = entry.model
    return Provided(settings, known.key_variable)


OPENERS: dict[str, Callable[[Entry], Provided]] = {
    **{name: partial(_served, kind) for kind in KINDS.values() for name in kind.litellm},
    "azure": _azure,
    "bedrock": _bedrock,
    "huggingface": _huggingface,
    "nvidia_nim": _nim,
    "vertex_ai": _vertex,
    "watsonx": _watsonx,
}
