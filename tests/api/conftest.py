"""Fixtures of tests that would otherwise wait for the gateway's patience."""

import pytest


@pytest.fixture
def brief_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up a replica that broke its connections after 0.3 s, and not after 3 s."""
    for module in ("outcomes", "retries"):
        monkeypatch.setattr(f"gateway.lane.{module}.RETURN_S", 0.3)
