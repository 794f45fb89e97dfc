"""`gateway replicas`: list the replicas of a running gateway, drain one, and put it back."""

import argparse
from collections.abc import Mapping
from typing import Any

from gateway.cli.gateway_client import GatewayClient, RequestRefused
from gateway.cli.operator_options import add_operator_options, ask_gateway
from gateway.cli.output import print_json, show_table
from gateway.cli.printable import plain
from gateway.cli.status import PATH, replica_table
from gateway.telemetry.snapshot import ReplicaStatus, Snapshot

# An edit of the additions waits for all workers.
TIMEOUT_S = 30.0


def add_replicas_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway replicas` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    listing = actions.add_parser("list", help="all replicas, with their states and attempts")
    drain = actions.add_parser("drain", help="give a replica no new work; batches in flight finish")
    undrain = actions.add_parser("undrain", help="give a drained replica work again")
    for action in (drain, undrain):
        action.add_argument("replica", metavar="URL", help="its address, as `list` shows it")
        action.add_argument(
            "--upstream", metavar="NAME", help="needed if several upstreams have this replica"
        )
    for action in (listing, drain, undrain):
        add_operator_options(action)


def run_replicas(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action; return 1 if the gateway cannot be reached or refuses the request."""
    return ask_gateway(options, environment, lambda client, _: _run(options, client), TIMEOUT_S)


def _run(options: argparse.Namespace, client: GatewayClient) -> None:
    """Run an action. Raises: RequestRefused, GatewayUnavailable."""
    if options.action == "list":
        snapshot = client.get(PATH, Snapshot)
        if options.json:
            print_json(snapshot.replicas)
        else:
            show_table(replica_table(snapshot, is_wide=True))
        return
    upstream = options.upstream or _upstream_of(options.replica, client)
    body = {"upstream": upstream, "replica": options.replica}
    report = client.post(f"/admin/replicas/{options.action}", body, dict[str, Any])
    if options.json:
        print_json(report)
        return
    found = _find(client.get(PATH, Snapshot), upstream, options.replica)
    state = (
        "" if found is None else f"; its state is {found.state}, {found.in_flight_batches} batches in flight"
    )
    done = "gets no new work" if options.action == "drain" else "gets work again once it responds"
    print(plain(f"{options.replica} of {upstream} {done}{state}"))


def _upstream_of(replica: str, client: GatewayClient) -> str:
    """Return the one upstream that has a replica. Raises: RequestRefused, GatewayUnavailable."""
    snapshot = client.get(PATH, Snapshot)
    names = sorted({each.upstream for each in snapshot.replicas if each.name == replica})
    if not names:
        raise RequestRefused(f"no upstream has the replica {replica}; `gateway replicas list` shows all")
    if len(names) > 1:
        raise RequestRefused(f"{replica} is a replica of {', '.join(names)}: name one with --upstream")
    return names[0]


def _find(snapshot: Snapshot, upstream: str, replica: str) -> ReplicaStatus | None:
    return next(
        (each for each in snapshot.replicas if (each.upstream, each.name) == (upstream, replica)), None
    )
