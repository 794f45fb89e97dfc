"""Settings of Amazon Bedrock, and facts that are known without its adapter."""

import re
from collections.abc import Iterator, Mapping

from backends.contract import VENDOR_KEYS, KindSettings, ServerKind

REGION = re.compile(r"[a-z]{2}(?:-[a-z]+)+-\d")


class BedrockSettings(KindSettings, frozen=True):
    """Settings of models of Amazon Bedrock.

    region: None if the address names it. profile: of AWS' configuration files. family: beginning of the id
    of the model behind an inference profile whose ARN does not name it. input_type: the API's word for each
    role, in place of the gateway's choice.
    """

    region: str | None = None
    profile: str | None = None
    family: str | None = None
    input_type: Mapping[str, str] = {}

    @property
    def uses_machine(self) -> bool:
        """True: without a key, the credentials of the machine are used."""
        return True

    def address(self) -> str | None:
        """Return the base URL of the runtime in a region."""
        return None if self.region is None else f"https://bedrock-runtime.{self.region}.amazonaws.com"

    def accounts(self) -> Iterator[str]:
        """Yield the profile."""
        if self.profile is not None:
            yield "profile"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the problem of a region that cannot be one."""
        if self.region is not None and not REGION.fullmatch(self.region):
            yield "region", "not the name of a region of AWS, such as us-east-1"


BEDROCK = ServerKind(
    "bedrock",
    "backends.bedrock.adapter",
    is_vendor=True,
    settings=BedrockSettings,
    extra="aws",
    provider="aws.bedrock",
    variables=("AWS_",),
    hosts=("amazonaws.com",),
    keys=VENDOR_KEYS | {"bedrock"},
    address_key="bedrock.region",
    address_hint="a region such as us-east-1, or ${AWS_REGION}, which is not read by itself",
)
