"""`gateway drain`: have load balancers send a running gateway no more calls, or send it calls again."""

import argparse
from collections.abc import Mapping
from typing import Any

from gateway.cli.gateway_client import GatewayClient
from gateway.cli.operator_options import add_operator_options, ask_gateway
from gateway.cli.output import print_json
from gateway.cli.printable import plain


def add_drain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gateway drain` to its parser."""
    add_operator_options(parser).add_argument("--undo", action="store_true", help="have it get calls again")


def run_drain(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Drain the gateway or end its drain; return 1 if it cannot be reached or refuses the request."""
    return ask_gateway(options, environment, lambda client, _: _drain(options, client))


def _drain(options: argparse.Namespace, client: GatewayClient) -> None:
    """Send the request, and show the result. Raises: RequestRefused, GatewayUnavailable."""
    report = client.post("/admin/undrain" if options.undo else "/admin/drain", None, dict[str, Any])
    if options.json:
        print_json(report)
    elif options.undo:
        print(
            f"gateway {plain(str(report['gateway']))} is ready for calls again, if nothing else prevents it"
        )
    else:
        print(
            f"gateway {plain(str(report['gateway']))} is drained: load balancers that check /readyz send it "
            "no more calls, and those that arrive are served. `gateway drain --undo` or a stop ends this."
        )
