"""Identity of one gateway among others, for as long as its parent process runs."""

import os
import secrets
import socket
import time

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A gateway.

    id: random. pid: of the parent process. address: that it listens on. started_s: seconds since 1970.
    """

    id: str
    host: str
    pid: int
    address: str
    started_s: float

    @property
    def name(self) -> str:
        """Name for people: its host, with the port of its address."""
        return f"{self.host}:{self.address.rpartition(':')[2]}"


def new_identity(address: str) -> Identity:
    """Return the identity of a gateway that starts now in this process."""
    return Identity(secrets.token_hex(4), socket.gethostname(), os.getpid(), address, time.time())
