"""Google's clients on the paths of models that they share with OpenAI's."""

from gateway.api.server.call_io import Scope

SHARED = "/v1/models"
GEMINI = "/v1beta/models"
READS = frozenset({"GET", "HEAD"})
KEY_OF_GEMINI = b"x-goog-api-key"
KEY_OF_OTHERS = b"authorization"


def move_gemini_path(scope: Scope) -> None:
    """Move a request for models to Gemini's path if its key stands where only Google's clients send it."""
    path: str = scope["path"]
    if scope["method"] not in READS or not (path == SHARED or path.startswith(f"{SHARED}/")):
        return
    raw: bytes = scope.get("raw_path", path.encode())
    if not raw.startswith(SHARED.encode()):
        return
    names = {name for name, _ in scope["headers"]}
    if KEY_OF_GEMINI in names and KEY_OF_OTHERS not in names:
        scope["path"] = GEMINI + path.removeprefix(SHARED)
        scope["raw_path"] = GEMINI.encode() + raw[len(SHARED) :]
