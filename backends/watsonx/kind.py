"""Settings of watsonx.ai, and facts that are known without its adapter."""

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec

from backends.contract import VENDOR_KEYS, KindSettings, ServerKind

VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")


class WatsonxSettings(KindSettings, frozen=True):
    """Settings of a project or space.

    region: of the default address. version: date of the API. iam: address of the identity service that turns
    the key into tokens. input_tokens: length at which inputs are cut; without it long ones are refused.
    """

    region: str = "us-south"
    project_id: str | None = None
    space_id: str | None = None
    version: str = "2024-10-25"
    iam: str = "https://iam.cloud.ibm.com"
    input_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def address(self) -> str:
        """Return the base URL of a region."""
        return f"https://{self.region}.ml.cloud.ibm.com"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the problems of the project, the version and the other values."""
        if (self.project_id is None) is (self.space_id is None):
            yield "project_id", "write it or `space_id`, the one that is billed"
        if not VERSION.fullmatch(self.version):
            yield "version", "is not a date such as 2024-10-25"
        if not self.iam.startswith(("https://", "http://")):
            yield "iam", "is not the address of an identity service, https://host"


WATSONX = ServerKind(
    "watsonx",
    "backends.watsonx.adapter",
    is_vendor=True,
    settings=WatsonxSettings,
    provider="ibm.watsonx.ai",
    keys=VENDOR_KEYS | {"watsonx", "task"},
)
