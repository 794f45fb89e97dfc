"""A worker's end of the pipes to its parent.

Configs, replies and restart counts arrive on one; requests, confirmations and heartbeats leave on the other.
"""

import asyncio
import os
import select
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any, TypeAlias, TypeVar

import msgspec

from gateway.config.diff import ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import Config
from gateway.declared.additions import Edit, Listing
from gateway.declared.host import HostCommand, HostResult, InstanceInfo
from gateway.events import Observe, ProcessRestarted
from gateway.processes import messages

# An engine may have to load a model before the reply.
RELOAD_TIMEOUT_S = 600.0
LISTING_TIMEOUT_S = 10.0
# An instance stops within 30 s for calls in flight and 35 s for its process.
HOST_TIMEOUT_S = 120.0
# The parent kills a worker that has been silent for several times as long.
HEARTBEAT_EVERY_S = 1.0

# Serve a new config with the engines of its upstreams and the names of its added models. The task completes
# once all that it removed is closed.
ServeConfig: TypeAlias = Callable[
    [Config, Mapping[str, Mapping[str, str]], Collection[str], Collection[str] | None], "asyncio.Task[None]"
]
_Reply = TypeVar("_Reply", ReloadOutcome, Listing, HostResult)


class ParentLink:
    """Connection to the parent, used on the worker's event loop. status_fd: pipe that the parent reads."""

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self._serve_config: ServeConfig | None = None
        self._observe: Observe | None = None
        self._show_instances: Callable[[tuple[InstanceInfo, ...]], None] = lambda _: None
        self._differing_spaces: Callable[[Config], tuple[Problem, ...]] = lambda _: ()
        self._withdraw: Callable[[messages.CanaryWithdrawn], None] = lambda _: None
        # Replies that requests wait for, by the request's number.
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()

    def attach(
        self,
        serve_config: ServeConfig,
        observe: Observe,
        show_instances: Callable[[tuple[InstanceInfo, ...]], None],
    ) -> None:
        """Set the receivers of configs, events and instances. Must precede the first call of `receive`."""
        self._serve_config, self._observe = serve_config, observe
        self._show_instances = show_instances

    def attach_groups(
        self,
        differing_spaces: Callable[[Config], tuple[Problem, ...]],
        withdraw: Callable[[messages.CanaryWithdrawn], None],
    ) -> None:
        """Set the receivers of questions about vector spaces, and of withdrawn canaries."""
        self._differing_spaces, self._withdraw = differing_spaces, withdraw

    def send(self, message: messages.ToParent) -> None:
        """Send one message to the parent."""
        line = msgspec.json.encode(message) + b"\n"
        while line:
            # A signal may interrupt the write of a long line.
            line = line[os.write(self._status_fd, line) :]

    async def send_heartbeats(self) -> None:
        """Send a heartbeat every second; runs until cancelled."""
        poll = select.poll()
        poll.register(self._status_fd, select.POLLOUT)
        while True:
            # A stopped parent reads nothing, and a write that waits for it would block the requests too.
            if poll.poll(0):
                self.send(messages.Heartbeat())
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def request_reload(self) -> ReloadOutcome:
        """Ask the parent to read the file again. Raises: TimeoutError."""
        return await self._request(messages.ReadFile(), RELOAD_TIMEOUT_S, ReloadOutcome)

    async def request_edit(self, edit: Edit) -> ReloadOutcome:
        """Ask the parent to apply an edit of the additions. Raises: TimeoutError."""
        return await self._request(edit, RELOAD_TIMEOUT_S, ReloadOutcome)

    async def request_listing(self) -> Listing:
        """Ask the parent for the additions. Raises: TimeoutError."""
        return await self._request(messages.ListAdditions(), LISTING_TIMEOUT_S, Listing)

    async def request_host(self, command: HostCommand) -> HostResult:
        """Ask the parent to carry out a request about this host. Raises: TimeoutError."""
        return await self._request(command, HOST_TIMEOUT_S, HostResult)

    def receive(self, line: bytes) -> None:
        """Handle one line from the parent."""
        match msgspec.json.decode(line, type=messages.ToWorker):
            case messages.ConfigUpdate() as update:
                self._apply(update)
            case messages.Reply(number, body):
                waiter = self._replies.get(number)
                if waiter is not None and not waiter.done():
                    waiter.set_result(body)
            case messages.InstancesUpdate(instances):
                self._show_instances(instances)
            case messages.SpaceRequest(number, config):
                self.send(messages.SpaceReply(number, self._differing_spaces(config)))
            case messages.CanaryWithdrawn() | ProcessRestarted() as news:
                self._receive_news(news)

    def _receive_news(self, news: messages.CanaryWithdrawn | ProcessRestarted) -> None:
        """Handle what happened to another worker, or in another process."""
        if isinstance(news, messages.CanaryWithdrawn):
            self._withdraw(news)
        else:
            assert self._observe is not None
            self._observe(news)

    async def _request(
        self,
        body: messages.ReadFile | messages.ListAdditions | Edit | HostCommand,
        timeout_s: float,
        kind: type[_Reply],
    ) -> _Reply:
        number = next(self._numbers)
        waiter = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(messages.Request(number, body))
            async with asyncio.timeout(timeout_s):
                reply = await waiter
        finally:
            del self._replies[number]
        assert isinstance(reply, kind)
        return reply

    def _apply(self, update: messages.ConfigUpdate) -> None:
        assert self._serve_config is not None
        try:
            drained = self._serve_config(update.config, update.engines, update.added_models, update.restored)
        except OSError as error:
            self.send(messages.ConfigAck(update.number, str(error)))
            return
        self.send(messages.ConfigAck(update.number))
        drained.add_done_callback(lambda _: self.send(messages.ConfigDrained(update.number)))
