"""Models of the Gemini API and of Vertex AI by their names. Pure."""

from collections.abc import Mapping

import msgspec

from backends.contract import Embed, EmbedParts, Operation, Rerank, Truncate
from backends.google import embeddings
from backends.google.errors import failure
from backends.google.ranking import RANK, RANKING_PATH
from backends.hosted.models import HostedModel, HostedRoute

TASKS = {
    "query": "RETRIEVAL_QUERY",
    "document": "RETRIEVAL_DOCUMENT",
    "classification": "CLASSIFICATION",
    "clustering": "CLUSTERING",
    "similarity": "SEMANTIC_SIMILARITY",
}
# gemini-embedding-2 reads its task in the text, and knows no `taskType`.
PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "classification": "task: classification | query: ",
    "clustering": "task: clustering | query: ",
    "similarity": "task: sentence similarity | query: ",
}
MULTIMODAL = "gemini-embedding-2"
FIRST = "gemini-embedding-001"
RANKER = "semantic-ranker"
# Longest inputs, by Google's pages of models.
LENGTHS = {MULTIMODAL: 8192, FIRST: 2048}
BATCH_INPUTS_MAX = 100
PREDICT_INPUTS_MAX = 250
PREDICT_TOKENS_MAX = 20_000
RANKING_INPUTS_MAX = 200
MEDIA = frozenset({Operation.EMBED_IMAGE, Operation.EMBED_AUDIO})
CUTS = frozenset({Truncate.ERROR, Truncate.RIGHT})
ALWAYS_CUTS = frozenset({Truncate.RIGHT})


def gemini_model(name: str, input_type: Mapping[str, str]) -> HostedModel:
    """Return a model of the Gemini API. input_type: the task of each role, in place of the API's own."""
    bare = name.removeprefix("models/")
    route = embeddings.BATCH
    model = HostedModel(
        f"models/{bare}",
        f"/models/{bare}",
        "Gemini API",
        {Embed: route},
        failure,
        truncation=ALWAYS_CUTS,
        request_inputs=BATCH_INPUTS_MAX,
    )
    return _with_traits(model, bare, route, input_type)


def vertex_model(name: str, project: str, location: str, input_type: Mapping[str, str]) -> HostedModel:
    """Return a model of Vertex AI, or of the ranking API. input_type: as in `gemini_model`.

    name: a name of Google's, or a path such as publishers/NAME/models/NAME. Older text models have `predict`,
    and all others `embedContent`, as Google's own client calls them.
    """
    if name.startswith(RANKER):
        return HostedModel(
            name,
            RANKING_PATH.format(project=project),
            "Google ranking API",
            {Rerank: RANK},
            failure,
            truncation=ALWAYS_CUTS,
            request_inputs=RANKING_INPUTS_MAX,
        )
    root = f"/v1/projects/{project}/locations/{location}"
    path = f"{root}/{name}" if name.startswith("publishers/") else f"{root}/publishers/google/models/{name}"
    bare = name.rpartition("/")[2]
    takes_one = "gemini" in bare or "maas" in bare
    route = embeddings.CONTENT if takes_one else embeddings.PREDICT
    model = HostedModel(
        name,
        path,
        "Vertex AI",
        {Embed: route},
        failure,
        truncation=CUTS,
        request_inputs=1 if takes_one else PREDICT_INPUTS_MAX,
        request_tokens=None if takes_one else PREDICT_TOKENS_MAX,
    )
    return _with_traits(model, bare, route, input_type)


def _with_traits(
    model: HostedModel, bare: str, route: HostedRoute, input_type: Mapping[str, str]
) -> HostedModel:
    """Return a model with its roles, its length and its media. bare: its name without a path."""
    is_multimodal = bare.startswith(MULTIMODAL)
    lengths = [length for start, length in LENGTHS.items() if bare.startswith(start)]
    return msgspec.structs.replace(
        model,
        routes={Embed: route, EmbedParts: route} if is_multimodal else model.routes,
        types={} if is_multimodal and not input_type else {**TASKS, **input_type},
        prompts=PROMPTS if is_multimodal else {},
        max_tokens=lengths[0] if lengths else None,
        media=MEDIA if is_multimodal else frozenset(),
    )
