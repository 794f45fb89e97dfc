"""Configurations that a test writes as text: read, or refused with problems."""

from pathlib import Path

import pytest

from gateway.config.load import parse_config
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config

BASE = Path("/srv/gateway")


def parsed(text: str, **environment: str) -> Config:
    """Read a configuration that stands in the folder `BASE`."""
    return parse_config(text, environment, BASE)


def problems_of(text: str, **environment: str) -> list[Problem]:
    """Return the problems of a configuration, which is refused."""
    with pytest.raises(ConfigError) as refused:
        parsed(text, **environment)
    return refused.value.problems
