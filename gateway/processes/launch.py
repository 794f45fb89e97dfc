"""Start of a child process: `python -m gateway.processes.launch MODULE` runs the `main` of a module.

The garbage collector rests while modules are imported, of which it would find nothing to free: it takes a
tenth of the processor time of a start. What was imported lives as long as the process.
"""

import gc
import sys
from importlib import import_module
from types import ModuleType


def import_unscanned(name: str) -> ModuleType:
    """Import a module without garbage collections."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    import_unscanned(sys.argv[1]).main()
