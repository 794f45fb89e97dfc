"""Settings of Azure OpenAI, and facts that are known without its adapter."""

import re
from collections.abc import Iterator

from backends.contract import VENDOR_KEYS, KindSettings, ServerKind

API_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}(?:-preview)?|preview|latest")


class AzureSettings(KindSettings, frozen=True):
    """Settings of a deployment.

    api_version: of the API with a path for each deployment; None for the API of version 1. entra: requests
    carry tokens of Microsoft Entra ID in place of a key.
    """

    api_version: str | None = None
    entra: bool = False

    @property
    def uses_machine(self) -> bool:
        """True for tokens of Entra."""
        return self.entra

    def extra(self) -> str | None:
        """Return the packages for tokens."""
        return "azure" if self.entra else None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the problem of a version that is none."""
        if self.api_version is not None and not API_VERSION.fullmatch(self.api_version):
            yield "api_version", "is not a version such as 2024-10-21; leave it out for the API of version 1"


AZURE = ServerKind(
    "azure",
    "backends.azure.adapter",
    is_vendor=True,
    settings=AzureSettings,
    provider="azure.ai.openai",
    key_header="api-key",
    variables=("AZURE_", "IDENTITY_", "MSI_", "IMDS_"),
    keys=VENDOR_KEYS | {"azure", "extra_body", "task"},
    address_hint="the endpoint of your resource in a list, such as https://NAME.openai.azure.com",
    model_hint="the name of the deployment",
)
