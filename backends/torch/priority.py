"""Priority of threads whose work may wait."""

import os
import sys
from threading import get_native_id

# A tenth of the processor time of a thread of normal priority, where both want the same core.
BACKGROUND_NICENESS = 10
NICENESS_MAX = 19


def lower_priority() -> None:
    """Give this thread, and those that it starts, a tenth of the time of others. Linux only.

    A thread cannot raise its priority again without a privilege.
    """
    if sys.platform == "linux":
        # Linux keeps the niceness of each thread, whatever POSIX says of processes.
        own = get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, own) + BACKGROUND_NICENESS
        os.setpriority(os.PRIO_PROCESS, own, min(niceness, NICENESS_MAX))
