"""Completion of the OpenAPI document that Litestar generates: summaries, tags, fields, and examples."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler

from gateway.api.document.errors import error_bodies, error_kinds, narrow_errors
from gateway.api.document.fields import MEANINGS
from gateway.api.document.replies import describe_replies
from gateway.api.server.dialect import Dialect
from gateway.api.server.endpoints import JSON_ONLY, BodyForms, endpoint_of
from gateway.api.server.error_bodies import TEI, ErrorFormat
from gateway.api.server.paths import METHOD, options_of
from gateway.api.server.responses import ARROW, OCTETS

# Key of the texts in an application's `opt`.
OPTION: Final = "document"
Operation: TypeAlias = dict[str, Any]
# Begins a path whose wire format has versions.
VERSION: Final = re.compile(r"/v\d")
FIRST_FIELDS: Final = ("query", "input", "inputs", "texts", "documents", "model")
BYTES_MEANING = "The numbers, one vector after the other, for `encoding_format: bytes`."
ARROW_MEANING = (
    "An Arrow IPC stream. A body has one column of strings, and the other fields are in the query of the "
    "URL; a reply has one column of vectors."
)


class Texts(msgspec.Struct, frozen=True):
    """Texts that all dialects add to the document.

    tags: in the order of the document. examples: by the name of the body. meanings: of `Struct.field`, or of
    a field in any body. forms: of bodies and replies besides JSON, by path. formats: of error bodies.
    """

    tags: Mapping[str, str]
    examples: Mapping[str, Any]
    meanings: Mapping[str, str]
    forms: Mapping[str, BodyForms]
    formats: Sequence[ErrorFormat]


def texts_of(dialects: Sequence[Dialect]) -> Texts:
    """Return the texts of all dialects."""
    handlers = [handler for dialect in dialects for handler in dialect.handlers]
    endpoints = ((handler, endpoint_of(options_of(handler).answer)) for handler in handlers)
    return Texts(
        {tag: text for dialect in dialects for tag, text in dialect.tags.items()},
        {body.__name__: example for dialect in dialects for body, example in dialect.examples.items()},
        MEANINGS | {key: text for dialect in dialects for key, text in dialect.meanings.items()},
        {
            path.replace(":str}", "}"): endpoint.forms
            for handler, endpoint in endpoints
            if endpoint is not None
            for path in handler.paths
        },
        _formats(handlers),
    )


def _formats(handlers: Sequence[HTTPRouteHandler]) -> list[ErrorFormat]:
    """Return the formats of errors that handlers declare, and TEI's, which is that of all others."""
    formats = {TEI.name: TEI}
    for handler in handlers:
        options = options_of(handler)
        endpoint = endpoint_of(options.answer)
        declared = [options.errors, *(endpoint.dialects.values() if endpoint is not None else ())]
        formats |= {errors.name: errors for errors in declared if errors is not None}
    return list(formats.values())


@lru_cache(maxsize=1)
def completed(application: Litestar) -> dict[str, Any]:
    """Return the document of an application, which has its texts as an option. It is completed once."""
    return complete(application.openapi_schema.to_schema(), application.opt[OPTION])


def complete(document: dict[str, Any], texts: Texts) -> dict[str, Any]:
    """Return the document of all handlers, completed in place."""
    schemas = document["components"]["schemas"]
    _simplify_enums(document)
    _sort_paths(document, texts.tags)
    for path, item in document["paths"].items():
        forms = texts.forms.get(path, JSON_ONLY)
        if forms.arrow is not None:
            _add_arrow(item["post"])
        if forms.octets:
            _add_bytes(item["post"])
        for operation in item.values():
            _split_description(operation)
            _require_path_names(operation)
            _complete_body(operation, schemas, texts)
            narrow_errors(operation)
    _sort_fields(schemas)
    _describe_parts(schemas, texts.meanings)
    _describe_defaults(document)
    describe_replies(document)
    document["x-error-kinds"] = error_kinds()
    document["x-error-bodies"] = error_bodies(texts.formats)
    return document


def operation_id(method: str, path: str) -> str:
    """Return the id of an operation, such as postV1Embeddings, which is unique because its path is."""
    letters = "".join(letter if letter.isalnum() else " " for letter in path)
    words = letters.split() or ["root"]
    return method.lower() + "".join(word[0].upper() + word[1:] for word in words)


def _simplify_enums(document: dict[str, Any]) -> None:
    """Write enums as generators of clients need them: without null, and one spelling of each value.

    Null becomes a type of its own; otherwise generators name one set of values three times. Of values that
    differ in case only, which most generators refuse, the first stays.
    """
    for schema in list(_objects(document)):
        values = schema.get("enum")
        if not isinstance(values, list) or not any(isinstance(value, str) for value in values):
            continue
        texts = {str(value).lower(): value for value in reversed(values) if value is not None}
        plain = {"type": "string", "enum": list(reversed(texts.values()))}
        if None not in values:
            schema.update(plain)
        else:
            del schema["type"], schema["enum"]
            schema["oneOf"] = [plain, {"type": "null"}]


def _describe_defaults(document: dict[str, Any]) -> None:
    """Write defaults of bodies in words: to generators of types, a field with a default is always there."""
    schemas = document["components"]["schemas"]
    bodies = [
        operation["requestBody"]
        for item in document["paths"].values()
        for operation in item.values()
        if "requestBody" in operation
    ]
    pending: list[dict[str, Any]] = bodies
    seen: set[str] = set()
    while pending:
        for member in _objects(pending.pop()):
            name = str(member.get("$ref", "")).rpartition("/")[2]
            if name and name not in seen:
                seen.add(name)
                pending.append(schemas[name])
            for field in member.get("properties", {}).values():
                _describe_default(field)


def _describe_default(field: dict[str, Any]) -> None:
    default = field.pop("default", None)
    if default is not None:
        words = f"Default: {json.dumps(default)}."
        field["description"] = f"{field['description']} {words}" if "description" in field else words


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for member in value if isinstance(value, list) else ():
        yield from _objects(member)


def _sort_paths(document: dict[str, Any], tags: Mapping[str, str]) -> None:
    """Group the paths by their first tag, with versioned paths first and those below a model last."""
    items = document["paths"]
    tag_of = {path: next(iter(item.values()))["tags"][0] for path, item in items.items()}
    names = list(dict.fromkeys([*tags, *tag_of.values()]))

    def place(path: str) -> tuple[int, bool, bool, str]:
        return names.index(tag_of[path]), path.startswith("/models/{"), VERSION.match(path) is None, path

    # A method after a name is a segment of its own in the declared path only.
    document["paths"] = {path.replace(METHOD, ":"): items[path] for path in sorted(items, key=place)}
    document["tags"] = [{"name": name, "description": tags.get(name, name)} for name in names]


def _split_description(operation: Operation) -> None:
    """Make the first line of a handler's docstring the summary."""
    summary, _, rest = operation.get("description", "").partition("\n\n")
    if summary:
        operation["summary"] = " ".join(summary.split()).removesuffix(".")
        operation["description"] = rest or summary


def _require_path_names(operation: Operation) -> None:
    """Type names in a path as text without null, which a handler has for its paths without a name."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["schema"] = {"type": "string"}


def _add_arrow(operation: Operation) -> None:
    """Document that a body and a reply may be an Arrow stream."""
    stream = {"schema": {"type": "string", "format": "binary", "description": ARROW_MEANING}}
    operation["requestBody"]["content"][ARROW] = stream
    operation["responses"]["200"]["content"][ARROW] = stream


def _add_bytes(operation: Operation) -> None:
    """Document that a reply may be bytes without JSON."""
    numbers = {"schema": {"type": "string", "format": "binary", "description": BYTES_MEANING}}
    operation["responses"]["200"]["content"][OCTETS] = numbers


def _complete_body(operation: Operation, schemas: dict[str, Any], texts: Texts) -> None:
    """Describe the fields of a body, and give it an example."""
    for media in operation.get("requestBody", {}).get("content", {}).values():
        name = media["schema"].get("$ref", "").rpartition("/")[2]
        for field, schema in schemas.get(name, {}).get("properties", {}).items():
            meaning = texts.meanings.get(f"{name}.{field}") or texts.meanings.get(field)
            if meaning:
                schema.setdefault("description", meaning)
        if name in texts.examples:
            media["example"] = texts.examples[name]


def _sort_fields(schemas: dict[str, Any]) -> None:
    """Put what a caller has to send before the options, in the document and in generated clients."""
    for schema in schemas.values():
        fields = schema.get("properties", {})
        first = [name for name in FIRST_FIELDS if name in fields]
        if first:
            schema["properties"] = {name: fields[name] for name in dict.fromkeys([*first, *fields])}


def _describe_parts(schemas: dict[str, Any], meanings: Mapping[str, str]) -> None:
    """Describe the fields of objects inside bodies."""
    for place, meaning in meanings.items():
        name, _, field = place.partition(".")
        if field:
            schemas[name]["properties"][field].setdefault("description", meaning)
