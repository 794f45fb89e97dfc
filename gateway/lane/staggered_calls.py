"""Function calls that are spread over turns of the event loop."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable


class StaggeredCalls:
    """Queue of functions, of which one runs per turn of the event loop.

    Tenants take turns, and a tenant's functions keep their order.
    A lane delivers the replies of a joined batch this way. Delivered all at once, one tenant's replies would
    delay the calls of every other tenant.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()

    def add(self, tenant: str, function: Callable[[], None]) -> None:
        """Run a function in a later turn."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._run_next)
        self._pending.setdefault(tenant, deque()).append(function)

    def _run_next(self) -> None:
        tenant, functions = self._pending.popitem(last=False)
        function = functions.popleft()
        if functions:
            self._pending[tenant] = functions
        if self._pending:
            asyncio.get_running_loop().call_soon(self._run_next)
        function()
