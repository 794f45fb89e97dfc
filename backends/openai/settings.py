"""Settings of servers of OpenAI's API and its relatives, as an upstream has them."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

# Any server of OpenAI's API, and hosted APIs that differ in details.
ApiKind: TypeAlias = Literal["openai", "cohere", "jina", "voyage", "azure", "nim"]
# Vendors whose API is OpenAI's; each is a row of `vendors`.
VendorName: TypeAlias = Literal[
    "deepinfra",
    "fireworks",
    "mistral",
    "nebius",
    "openai",
    "openrouter",
    "perplexity",
    "siliconflow",
    "together",
]


class ApiSettings(msgspec.Struct, frozen=True):
    """Settings for servers of OpenAI's API and of its relatives; None leaves the choice to the kind.

    embeddings, rerank: paths, from the root of the server with a leading slash, else below the base URL.
    input_type: the server's word for each role, and for `default`. extra_body: fields of every request.
    task: the only operation that the model is asked for. vendor: whose API it is, None for that of the host.
    metered: every request costs money, which a server of the kind may not.
    """

    kind: ApiKind = "openai"
    embeddings: str | None = None
    rerank: str | None = None
    input_type: Mapping[str, str] | None = None
    extra_body: Mapping[str, Any] = {}
    task: Literal["embed", "rerank"] | None = None
    vendor: VendorName | None = None
    metered: bool = False
