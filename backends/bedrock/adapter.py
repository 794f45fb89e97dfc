"""Adapter of Amazon Bedrock: InvokeModel of its runtime, and Rerank of the agents' runtime."""

import re

import msgspec

from backends.bedrock.kind import BedrockSettings
from backends.bedrock.models import AGENT_HOST, HOST, model_of
from backends.bedrock.rerank import AGENT, next_page
from backends.bedrock.signing import AwsAuthorizer, check_installed
from backends.contract import ReplicaSpec, Rerank, TokenizerSource
from backends.contract.errors import ReplicaFailed
from backends.hosted.adapter import HostedBackend
from backends.hosted.models import Body, HostedModel
from backends.http.client import UpstreamClient, UpstreamResponse, countdown
from backends.http.egress import OpenClient, open_egress

# Of AWS' own hosts, and of their endpoints in a private network.
REGION_OF_HOST = re.compile(r"\bbedrock(?:-agent)?-runtime(?:-fips)?\.([a-z0-9-]+)\.(?:vpce\.)?amazonaws\.")
# As many pages as documents, at most.
PAGES_MAX = 1000


class BedrockBackend(HostedBackend):
    """Client of one model in one region."""

    def __init__(
        self,
        http: UpstreamClient,
        model: HostedModel,
        tokenizer: TokenizerSource | None,
        authorizer: AwsAuthorizer,
    ) -> None:
        super().__init__(http, model, tokenizer)
        self._authorizer = authorizer

    async def post(self, path: str, body: Body, rows: int, timeout_s: float) -> UpstreamResponse:
        """Send one request, and those for its further pages. Raises: BackendError."""
        remaining_s = countdown(timeout_s)
        response = await super().post(path, body, rows, remaining_s())
        if response.status == 403:
            # Expired credentials are refused with this status. The chain may have newer ones.
            self._authorizer.refused()
        if response.status != 200 or path != "/rerank":
            return response
        results, following = next_page(body, response)
        for _ in range(PAGES_MAX):
            if following is None:
                break
            response = await super().post(path, following, rows, remaining_s())
            if response.status != 200:
                return response
            more, following = next_page(body, response)
            results += more
        return msgspec.structs.replace(response, body=msgspec.json.encode({"results": results}))


def open_replica(spec: ReplicaSpec, open_client: OpenClient = open_egress) -> BedrockBackend:
    """Return a client of the model at the spec's base URL.

    Raises: ModelUnavailable, without botocore; ReplicaFailed, if the model or its region is not known.
    """
    check_installed()
    settings = spec.settings if isinstance(spec.settings, BedrockSettings) else BedrockSettings()
    region = settings.region or region_of(spec.address)
    if region is None:
        raise ReplicaFailed("the address names no region of AWS: set `bedrock.region`")
    model = model_of(spec.model or "", region, settings, is_agent=AGENT_HOST in spec.address)
    is_agent = model.routes == {Rerank: AGENT}
    if is_agent:
        # The address of a region is that of its runtime.
        spec = msgspec.structs.replace(spec, address=spec.address.replace(f"//{HOST}.", f"//{AGENT_HOST}."))
    authorizer = AwsAuthorizer(spec, region, settings.profile, takes_keys=not is_agent)
    return BedrockBackend(open_client(spec, authorizer), model, spec.tokenizer, authorizer)


def region_of(address: str) -> str | None:
    """Return the region in the host of an address, None if it has none."""
    found = REGION_OF_HOST.search(address)
    return found[1] if found else None
