"""Errors of calls. It loads nothing heavy."""


class CallFailed(Exception):
    """A call failed, and repeating it changes nothing. The message is for a person."""


class CallStopped(Exception):
    """A call had no success until its deadline, or a limit is spent; the same call may succeed later.

    The message is for a person.
    """


class Refused(Exception):
    """The server refuses these texts or options. The message is the server's, with its status.

    kind: the server's word for the error. place: index of the text at fault, as the server reports it; None
    if it does not.
    """

    def __init__(self, message: str, kind: str, place: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.place = place


class TooSlow(Refused):
    """The server's own deadline for a call passed, and it wants fewer inputs. The message is the server's."""


class Unreadable(Exception):
    """A reply with status 200 that is not one of an embeddings API."""
