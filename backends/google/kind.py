"""Settings of Vertex AI and of the Gemini API, and facts that are known without their adapters."""

import re
from collections.abc import Iterator, Mapping

from backends.contract import VENDOR_KEYS, KindSettings, LiteLLMProvider, ServerKind

GLOBAL = "global"
# Of several regions each, with hosts of their own.
MULTI_REGIONS = frozenset({"us", "eu"})
# It begins the name of a host.
LOCATION = re.compile(r"[a-z]+(?:-[a-z]+)*\d{0,2}")
# An id, which a domain may precede, or a number.
PROJECT = re.compile(r"(?:[a-z0-9-]+(?:\.[a-z0-9-]+)+:)?[a-z0-9-]+")


class GeminiSettings(KindSettings, frozen=True):
    """Settings of models of the Gemini API. input_type: the task of each role, in place of the API's own."""

    input_type: Mapping[str, str] = {}


class VertexSettings(KindSettings, frozen=True):
    """Settings of models of Vertex AI and of the ranking API.

    credentials: path of a file of a service account or of workload identity; None for the default credentials
    of the machine. input_type: as in `GeminiSettings`.
    """

    project: str = ""
    location: str = GLOBAL
    credentials: str | None = None
    input_type: Mapping[str, str] = {}

    @property
    def uses_machine(self) -> bool:
        """True: without a key, the credentials of the machine are used."""
        return True

    def address(self) -> str:
        """Return the base URL of a location."""
        if self.location in MULTI_REGIONS:
            return f"https://aiplatform.{self.location}.rep.googleapis.com"
        prefix = "" if self.location == GLOBAL else f"{self.location}-"
        return f"https://{prefix}aiplatform.googleapis.com"

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the file of the credentials."""
        if self.credentials is not None:
            yield "credentials", self.credentials

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the problems of the project and of a location that cannot be one."""
        if not self.project:
            yield "project", "is missing; it is the id of the project that is billed"
        elif not PROJECT.fullmatch(self.project):
            yield "project", "not the id of a project, such as my-project-123456"
        if not LOCATION.fullmatch(self.location):
            yield "location", f"not the name of a location, such as europe-west4 or {GLOBAL}"


GEMINI = ServerKind(
    "gemini",
    "backends.google.gemini",
    "https://generativelanguage.googleapis.com/v1beta",
    is_vendor=True,
    settings=GeminiSettings,
    provider="gcp.gemini",
    key_header="x-goog-api-key",
    litellm={"gemini": LiteLLMProvider(key_variable="GEMINI_API_KEY")},
    keys=VENDOR_KEYS | {"gemini"},
)
VERTEX = ServerKind(
    "vertex",
    "backends.google.vertex",
    is_vendor=True,
    settings=VertexSettings,
    extra="google",
    provider="gcp.vertex_ai",
    variables=("GOOGLE_", "CLOUDSDK_", "GCE_METADATA_", "NO_GCE_CHECK"),
    hosts=("googleapis.com",),
    keys=VENDOR_KEYS | {"vertex"},
)
