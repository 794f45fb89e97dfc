"""Writer of docs/translation-hosted.md: what hosted APIs are asked for, from the tables of their kinds.

`python docs/translation_hosted.py` writes the page; a test compares it with the tables.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from backends.azure.adapter import RERANK_PATH
from backends.bedrock.models import FAMILIES
from backends.contract import Embed, EmbedParts, Operation, ReplicaSpec, Rerank, Truncate
from backends.google.models import FIRST, MULTIMODAL, RANKER, gemini_model, vertex_model
from backends.hosted.models import HostedModel
from backends.huggingface import adapter as huggingface
from backends.huggingface.kind import HuggingFaceSettings
from backends.openai.settings import ApiSettings
from backends.openai.shapes import SHAPES, ApiShape
from backends.openai.vendors import JINA_MULTIMODAL_RANKER, VENDORS, VOYAGE_MULTIMODAL, shape_of
from backends.watsonx import adapter as watsonx
from backends.watsonx.kind import WatsonxSettings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/translation-hosted.md"
HEAD = """\
# Translation: every route over hosted APIs

Look up a vendor: the rows show what the gateway asks it for, and what it does itself. Callers use every
[dialect](dialects.md), as over [servers](translation.md). "Refused" means an error in the caller's dialect
that states the reason. `make translation` writes this page from the tables of the adapters.

[Hosted APIs](backends.md#hosted-apis) and [the clouds](backends-clouds.md) have addresses, keys, cost, and
what these adapters were tried with.
"""
RULES = """\

## Rules of all rows

| route or option | over every row |
|---|---|
| `/v1/embeddings`, `/v2/embed`, `/embed` and other routes of vectors | the row's embeddings |
| `/rerank`, `/v1/rerank`, `/v2/rerank`, `/v1/ranking` | its rerank; without one and without roles, cosines |
| `/score`, `/v1/score` | one rerank for each query; without one, cosines |
| `/embed_sparse`, `/embed_all`, multi-vectors, labels | refused |
| `/tokenize`, `/decode`, roles as prompts | by the gateway, if `tokenizer` is set; else refused |
| number types and base64 | by the gateway, from float numbers |
| `dimensions` | cut here and normalized, unless the row lists widths that its API takes |
| `top_n`, order, documents in the reply | by the gateway; the API scores every document |
| more inputs than the row takes | several requests, joined in the caller's order |
| tokens in `usage` | of the reply if the API counts them; else by `tokenizer`; else see the next rows |
| … of `bedrock`, `gemini`, `vertex`, `huggingface`, `watsonx` | estimated by the bytes of the texts |
| … of `cohere`, `jina`, `voyage`, `azure`, `nim`, `openai` | the replica does not join |
| statuses | translated, as [errors](errors.md) lists them |
"""
REQUESTS = """\

## Requests

`inputs` and `tokens` are the most of one request. A dash means that the API states no such bound.

"""
OPTIONS = """\

## Options

| sign | meaning |
|---|---|
| `error`, `right`, `left` | treatments of an input that is too long; of two, that of embeddings is first |
| API | the API does it |
| tokenizer | if `upstreams.<name>.tokenizer` is set |
| fits | if the input is known to fit, by `tokenizer` or its size; else refused |
| widths | values of `dimensions` that are sent to the API |
| raw | vectors that are not normalized, or raw scores |

"""
# Paths that an adapter chooses by `task` or address.
RERANKS = {"azure": RERANK_PATH, "nim": "/v1/ranking"}
RANKERS_OF_IMAGES = {"jina": JINA_MULTIMODAL_RANKER, "nim": "nvidia/llama-nemotron-rerank-vl-1b-v2"}
# Of a length that an operator states, without which watsonx refuses long inputs.
WATSONX_TOKENS = 512


class Row(NamedTuple):
    """Facts of one API or model."""

    upstream: str
    models: str
    embeds: bool
    reranks: bool
    media: frozenset[Operation]
    inputs: tuple[int | None, int | None]
    tokens: int | None
    types: Mapping[str, str]
    prompts: bool
    embed_cuts: frozenset[Truncate]
    rerank_cuts: frozenset[Truncate]
    widths: tuple[int, ...] = ()
    raw_vectors: bool = False
    raw_scores: str = "–"


def page() -> str:
    """Return the page for the tables as they are."""
    rows = [*_openai_rows(), *_hosted_rows()]
    requests = _table(
        ("upstream", "models", "embeds", "reranks", "media", "inputs", "tokens"), map(_request, rows)
    )
    options = _table(
        ("upstream", "models", "query, document", "`error`", "`right`", "`left`", "widths", "raw"),
        map(_options, rows),
    )
    return f"{HEAD}{RULES}{REQUESTS}{requests}{OPTIONS}{options}"


def _openai_rows() -> Iterator[Row]:
    for kind in SHAPES:
        if kind == "openai":
            continue
        settings = ApiSettings(kind, rerank=RERANKS.get(kind))
        yield _openai_row(f"`{kind}`", "all", shape_of(settings))
        if (ranker := RANKERS_OF_IMAGES.get(kind)) is not None:
            yield _openai_row(f"`{kind}`", f"`{ranker}`", shape_of(settings, ranker), embeds=False)
        if kind == "nim":
            embedder = "nvidia/llama-nemotron-embed-vl-1b-v2"
            yield _openai_row("`nim`", f"`{embedder}`", shape_of(ApiSettings("nim"), embedder))
        if kind == "voyage":
            yield _openai_row(f"`{kind}`", f"`{VOYAGE_MULTIMODAL}-…`", shape_of(settings, VOYAGE_MULTIMODAL))
    for name, vendor in sorted(VENDORS.items()):
        yield _openai_row(f"`openai`, {name}", "all", vendor.shape)


def _openai_row(upstream: str, models: str, shape: ApiShape, *, embeds: bool = True) -> Row:
    media = {
        Operation.EMBED_IMAGE: shape.media if embeds else None,
        Operation.RERANK_IMAGE: shape.rerank_media,
    }
    return Row(
        upstream,
        models,
        embeds=embeds,
        reranks=shape.rerank is not None,
        media=frozenset(kind for kind, form in media.items() if form),
        inputs=(shape.embed_inputs, shape.rerank_inputs),
        tokens=shape.request_tokens,
        types=shape.input_type,
        prompts=False,
        embed_cuts=frozenset(shape.truncation),
        rerank_cuts=frozenset(shape.rerank_truncation),
        raw_scores="–" if shape.rerank is None else "scores, if logits",
    )


def _hosted_rows() -> Iterator[Row]:
    for start, model in FAMILIES.items():
        yield _hosted_row("`bedrock`", f"`{start}…`", model)
    for name in (FIRST, MULTIMODAL):
        yield _hosted_row("`gemini`", f"`{name}`", gemini_model(name, {}))
    for name, shown in (
        ("text-embedding-005", "`text-embedding-…`"),
        (FIRST, f"`{FIRST}`"),
        (MULTIMODAL, f"`{MULTIMODAL}`"),
        (RANKER, f"`{RANKER}-…`"),
    ):
        yield _hosted_row("`vertex`", shown, vertex_model(name, "project", "global", {}))
    for task in ("embed", "rerank"):
        settings = HuggingFaceSettings(task=task)
        yield _hosted_row(
            "`huggingface`",
            f"`task: {task}`",
            _model(huggingface.open_replica, ReplicaSpec("", settings=settings)),
        )
    for task in ("embed", "rerank"):
        spec = ReplicaSpec("", task=task, settings=WatsonxSettings(input_tokens=WATSONX_TOKENS))
        yield _hosted_row("`watsonx`", f"`task: {task}`", _model(watsonx.open_replica, spec))


def _model(open_replica: Any, spec: ReplicaSpec) -> HostedModel:
    """Return the model of a backend that has no client."""
    found: HostedModel = open_replica(spec, lambda *_: None)._model  # noqa: SLF001 - the adapter builds it of its settings
    return found


def _hosted_row(upstream: str, models: str, model: HostedModel) -> Row:
    embeds = Embed in model.routes or EmbedParts in model.routes
    cuts = model.truncation
    return Row(
        upstream,
        models,
        embeds=embeds,
        reranks=Rerank in model.routes,
        media=model.media,
        inputs=(model.request_inputs, None) if embeds else (None, model.request_inputs),
        tokens=model.request_tokens,
        types=model.types,
        prompts=bool(model.prompts),
        embed_cuts=cuts,
        rerank_cuts=cuts,
        widths=model.widths,
        raw_vectors=model.plain_vectors and embeds,
        raw_scores="scores" if model.raw_scores and not embeds else "–",
    )


def _request(row: Row) -> tuple[str, ...]:
    kinds = {
        Operation.EMBED_IMAGE: "images",
        Operation.EMBED_AUDIO: "sound",
        Operation.RERANK_IMAGE: "images in pairs",
    }
    media = ", ".join(name for kind, name in kinds.items() if kind in row.media)
    embed_inputs, rerank_inputs = row.inputs
    inputs = [_count(embed_inputs)] if row.embeds else []
    if row.reranks and rerank_inputs:
        inputs.append(f"{_count(rerank_inputs)} documents")
    return (
        row.upstream,
        row.models,
        "yes" if row.embeds else "–",
        "yes" if row.reranks else "–",
        media or "–",
        "; ".join(inputs) or "–",
        _count(row.tokens),
    )


def _options(row: Row) -> tuple[str, ...]:
    words = [row.types[role] for role in ("query", "document") if role in row.types]
    roles = ", ".join(f"`{word}`" for word in words)
    if row.prompts:
        roles = "its own prompts"
    elif not roles:
        roles = "tokenizer" if row.embeds else "–"
    treated = [_treated(row, way) for way in (Truncate.ERROR, Truncate.RIGHT, Truncate.LEFT)]
    raw = [name for name in ("vectors" if row.raw_vectors else "", row.raw_scores) if name not in {"", "–"}]
    widths = ", ".join(map(str, row.widths))
    return row.upstream, row.models, roles, *treated, widths or "–", ", ".join(raw) or "–"


def _treated(row: Row, way: Truncate) -> str:
    """Return who treats long inputs that way."""
    embed, rerank = (_by(cuts, way) for cuts in (row.embed_cuts, row.rerank_cuts))
    found = [embed] if row.embeds else []
    if row.reranks and rerank not in found:
        found.append(rerank)
    return "; ".join(found)


def _by(cuts: frozenset[Truncate], way: Truncate) -> str:
    if way in cuts:
        return "API"
    if way is Truncate.LEFT:
        return "fits"
    if way is Truncate.ERROR:
        return "tokenizer" if cuts else "API"
    return "as the API does" if not cuts else "fits"


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    first, *others = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join((first, "|---" * len(head) + "|\n", *others))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
