"""Memory that pyarrow allocates."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa


@contextmanager
def counted_memory() -> Iterator[pa.MemoryPool]:
    """Yield a pool that counts what pyarrow allocates in the block, with its peak."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)
