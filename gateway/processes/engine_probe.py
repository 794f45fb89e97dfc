"""Liveness of an engine process."""

import asyncio

# An engine's event loop shares its process with threads that compute and load, and may respond slowly.
CHECK_EVERY_S = 5.0


async def responds(socket_path: str) -> bool:
    """Return True if the engine's event loop answers a request."""
    try:
        async with asyncio.timeout(CHECK_EVERY_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            writer.write(b"GET /info HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n")
            has_response = bool(await reader.read(1))
            writer.close()
            return has_response
    except (OSError, TimeoutError):
        return False
