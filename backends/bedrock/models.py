"""Models of Amazon Bedrock by the beginning of their ids. Pure."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from backends.bedrock import embeddings, rerank
from backends.bedrock.errors import failure
from backends.bedrock.kind import BedrockSettings
from backends.contract import BaseWork, Embed, EmbedParts, Operation, Rerank, Truncate
from backends.contract.errors import ReplicaFailed
from backends.hosted.models import DEFAULT_TYPE, HostedModel, HostedRoute

# Of a body of InvokeModel, by the service model.
BODY_BYTES_MAX = 25_000_000
RERANK_INPUTS_MAX = 1000
COHERE_INPUTS_MAX = 96
# Of an inference profile across regions.
PROFILE_PREFIX = re.compile(r"(?:us|eu|apac|jp|au|ca|sa|us-gov|global)\.(?=[a-z]+\.)")


ANY_CUT = frozenset(Truncate)
IMAGES = frozenset({Operation.EMBED_IMAGE})
RIGHT_ONLY = frozenset({Truncate.RIGHT})


def _family(version: str, routes: Mapping[type[BaseWork], HostedRoute], **facts: Any) -> HostedModel:
    limits = {"request_bytes": BODY_BYTES_MAX, "request_inputs": 1} | facts
    return HostedModel("", "", f"Amazon Bedrock, {version}", routes, failure, **limits)


# By the beginning of the model's id, the longer first.
FAMILIES: dict[str, HostedModel] = {
    "amazon.titan-embed-image": _family(
        "Titan",
        {Embed: embeddings.TITAN_IMAGE, EmbedParts: embeddings.TITAN_IMAGE},
        widths=(256, 384, 1024),
        has_fixed_widths=True,
        media=IMAGES,
    ),
    "amazon.titan-embed-text-v2": _family(
        "Titan", {Embed: embeddings.TITAN_V2}, widths=(256, 512, 1024), plain_vectors=True
    ),
    "amazon.titan-embed": _family("Titan", {Embed: embeddings.TITAN}),
    "amazon.nova-2-multimodal-embeddings": _family(
        "Nova",
        {Embed: embeddings.NOVA, EmbedParts: embeddings.NOVA},
        types={
            "query": "GENERIC_RETRIEVAL",
            "document": "GENERIC_INDEX",
            "classification": "CLASSIFICATION",
            "clustering": "CLUSTERING",
            DEFAULT_TYPE: "GENERIC_INDEX",
        },
        truncation=ANY_CUT,
        widths=embeddings.NOVA_WIDTHS,
        media=frozenset({Operation.EMBED_IMAGE, Operation.EMBED_AUDIO}),
    ),
    "cohere.embed-v4": _family(
        "Cohere",
        {Embed: embeddings.COHERE_V4, EmbedParts: embeddings.COHERE_V4},
        types=embeddings.COHERE_TYPES,
        truncation=ANY_CUT,
        widths=(256, 512, 1024, 1536),
        media=IMAGES,
        request_inputs=COHERE_INPUTS_MAX,
    ),
    "cohere.embed": _family(
        "Cohere",
        {Embed: embeddings.COHERE_V3, EmbedParts: embeddings.COHERE_V3_PARTS},
        types=embeddings.COHERE_TYPES,
        truncation=ANY_CUT,
        media=IMAGES,
        request_inputs=COHERE_INPUTS_MAX,
    ),
    "cohere.rerank": _family(
        "Cohere",
        {Rerank: rerank.COHERE},
        truncation=RIGHT_ONLY,
        request_inputs=RERANK_INPUTS_MAX,
    ),
    "amazon.rerank": _family(
        "Amazon", {Rerank: rerank.AGENT}, truncation=RIGHT_ONLY, request_inputs=RERANK_INPUTS_MAX
    ),
}


# The agents' runtime reranks with the models of both. Its host is not that of InvokeModel.
HOST = "bedrock-runtime"
AGENT_HOST = "bedrock-agent-runtime"
ARN = "arn:{partition}:bedrock:{region}::foundation-model/{model}"
# Partitions of AWS by the beginning of their regions; all others are of `aws`.
PARTITIONS = {"us-gov-": "aws-us-gov", "cn-": "aws-cn"}


def model_of(name: str, region: str, settings: BedrockSettings, *, is_agent: bool) -> HostedModel:
    """Return the model of an id, an ARN or an inference profile. is_agent: the agents' runtime is addressed.

    Raises: ReplicaFailed.
    """
    bare = PROFILE_PREFIX.sub("", settings.family or name.rpartition("/")[2])
    found = next((model for start, model in FAMILIES.items() if bare.startswith(start)), None)
    if found is None:
        known = ", ".join(FAMILIES)
        raise ReplicaFailed(
            f"no request is known for the model {name!r}: set `bedrock.family` to the beginning of the id of "
            f"its model: {known}"
        )
    if is_agent or found.routes == {Rerank: rerank.AGENT}:
        if Rerank not in found.routes:
            raise ReplicaFailed(f"{AGENT_HOST} reranks only: address {HOST} for {name!r}")
        return msgspec.structs.replace(
            found, name=_arn_of(name, region), path="/rerank", routes={Rerank: rerank.AGENT}
        )
    # An ARN has colons and slashes.
    path = f"/model/{quote(name, safe='')}/invoke"
    types = {**found.types, **settings.input_type}
    return msgspec.structs.replace(found, name=name, path=path, types=types)


def _arn_of(name: str, region: str) -> str:
    """Return the ARN of a model, which its name may be."""
    if name.startswith("arn:"):
        return name
    partition = next((found for start, found in PARTITIONS.items() if region.startswith(start)), "aws")
    return ARN.format(partition=partition, region=region, model=name)
