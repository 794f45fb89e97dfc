"""Failures of a backend, each with its kind, its source and whether to retry on a different replica.

BackendError
 ├─ InvalidWork        the replica refused the caller's input    source caller, final
 ├─ UnsupportedWork    the backend cannot express the request    source caller, final
 ├─ RequestTooLarge    the request has too many bytes            smaller requests may pass
 ├─ ReplicaOverloaded  the replica has no room at the moment     retry elsewhere
 │   └─ PermitsTaken   fewer free permits than inputs            retry there soon, with fewer inputs
 ├─ ModelNotLoaded     the model is still being loaded           retry elsewhere
 ├─ ReplicaUnavailable not reached, or not ready                 retry elsewhere
 │   └─ ProxyRefused   the way there refuses the gateway         retry elsewhere
 ├─ ConnectionLost     the connection broke with work in flight  retry elsewhere
 ├─ AttemptTimedOut    no reply within the attempt's timeout     retry elsewhere
 ├─ ReplicaFailed      an error or an invalid reply              retry elsewhere, once
 │   ├─ CredentialRefused  the gateway's key is refused          retry elsewhere, once
 │   │   └─ CredentialMissing  the gateway has none to send      retry elsewhere, once
 │   └─ ModelNotServed     the upstream has no such model        retry elsewhere, once
 └─ ModelUnavailable   the checkpoint was not found or not read  source gateway, final
"""

from typing import ClassVar, Literal, Self

# Longest message of an error. Upstreams' words are quoted in logs, in status and to callers.
MESSAGE_CHARACTERS_MAX = 500
ErrorSource = Literal["caller", "gateway", "upstream"]


def printable(text: str) -> str:
    """Return a text on one line without control characters, and cut to `MESSAGE_CHARACTERS_MAX`.

    An upstream's words would otherwise forge lines of a text log, or fill it.
    """
    if len(text) > MESSAGE_CHARACTERS_MAX:
        text = text[: MESSAGE_CHARACTERS_MAX - 1] + "…"
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in text)


class BackendError(Exception):
    """Failure of a backend; the message is safe to show to a caller.

    input_index: place in the work of the one input at fault, None if it is not known.
    detail: the upstream's own words, or the place of the value that could not be read. They are for operators
    only, because they may quote the input of another caller of the same request.
    upstream_status: HTTP status or gRPC code of the upstream's answer, None without one.
    retry_after_s: time for which the upstream asks for no requests.
    """

    kind: ClassVar[str] = "failed"
    source: ClassVar[ErrorSource] = "upstream"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, empty: bool = False, input_index: int | None = None) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.input_index = input_index
        # TEI answers empty input with 400 and invalid input with 422.
        self.empty = empty
        self.detail = ""
        self.upstream_status: str | None = None
        self.retry_after_s: float | None = None

    @property
    def explanation(self) -> str:
        """Return the message with the detail, for logs and operators."""
        return printable(f"{self.message}: {self.detail}") if self.detail else self.message

    def with_facts(
        self, *, detail: str = "", upstream_status: str | None = None, retry_after_s: float | None = None
    ) -> Self:
        """Add facts about the upstream's answer, and keep those that are known already; return the error."""
        self.detail = self.detail or printable(detail)
        self.upstream_status = self.upstream_status or upstream_status
        self.retry_after_s = self.retry_after_s if retry_after_s is None else retry_after_s
        return self


class InvalidWork(BackendError):
    """Refusal of the input itself: too long, an unknown prompt, a number out of range."""

    kind = "invalid_input"
    source = "caller"
    retryable = False


# Source: Elasticsearch's OpenAiResponseHandler, which looks for these words.
SHORTEN = "Please reduce your prompt; or completion length."


def input_too_long(
    max_tokens: int | None, size: str | None = None, input_index: int | None = None
) -> InvalidWork:
    """Return the refusal of an input that is longer than the model.

    max_tokens: the model's length, None if it is not known. size: of the input, with its unit. Clients of
    OpenAI and vLLM recognize the first words: LiteLLM then falls back to a model with a larger context. The
    last words are OpenAI's too: Elasticsearch then sends half of each text.
    """
    if max_tokens is None:
        return InvalidWork(
            f"This model's maximum context length is exceeded. {SHORTEN}", input_index=input_index
        )
    length = f"; this input has {size}" if size else ", and an input has more"
    return InvalidWork(
        f"This model's maximum context length is {max_tokens} tokens{length}. {SHORTEN}",
        input_index=input_index,
    )


class UnsupportedWork(BackendError):
    """Request that the model or its wire cannot express."""

    kind = "unsupported"
    source = "caller"
    retryable = False


class RequestTooLarge(BackendError):
    """Refusal of a request for its size in bytes, by the server or by a proxy in front of it."""

    kind = "too_large"
    retryable = False


class ReplicaOverloaded(BackendError):
    """Refusal for lack of room; the replica did not start the work."""

    kind = "overloaded"


class PermitsTaken(ReplicaOverloaded):
    """Refusal of a batch that has more inputs than the server has free permits at this moment."""


class ModelNotLoaded(BackendError):
    """Refusal because the model is not in memory yet; the replica did not start the work.

    Raised at once if the request is not to wait for the load, otherwise when its wait is over.
    """

    kind = "loading"


class ReplicaUnavailable(BackendError):
    """Replica that was not reached or reports that it is not ready; it did not start the work."""

    kind = "unavailable"


class ProxyRefused(ReplicaUnavailable):
    """Refusal of the gateway by the proxy on the way to the upstream."""


class ConnectionLost(BackendError):
    """Broken connection to a replica that may have been working."""

    kind = "lost"


class AttemptTimedOut(BackendError):
    """Missing reply at the end of the timeout; the replica may still be working."""

    kind = "timed_out"


class ReplicaFailed(BackendError):
    """Error status of the replica, or a reply that does not answer the work."""

    kind = "failed"


class CredentialRefused(ReplicaFailed):
    """Refusal of the key that the gateway sends to the upstream."""


class CredentialMissing(CredentialRefused):
    """Absence of any credential that the gateway could send to the upstream."""


class ModelNotServed(ReplicaFailed):
    """Answer of an upstream that it has no model of this name for the gateway."""


class ModelUnavailable(BackendError):
    """Checkpoint that cannot be found, fetched or loaded; the message contains the remedy."""

    kind = "model_unavailable"
    source = "gateway"
    retryable = False
