"""`gateway instances`: the instances of a running gateway, through its admin API."""

import argparse
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from gateway.cli.gateway_client import GatewayClient
from gateway.cli.operator_options import add_operator_options, ask_gateway
from gateway.cli.output import NONE, print_json, print_result, show_table, table_of
from gateway.cli.printable import plain
from gateway.declared.host import InstanceInfo, LogSlice

PATH = "/admin/instances"
# An instance stops within 65 s. The gateway itself gives up after 120 s.
TIMEOUT_S = 130.0
LINES = 100
ACTIONS = {
    "start": "start an instance that is stopped or has failed",
    "stop": "stop an instance; calls in flight finish",
    "restart": "stop an instance and start it again",
    "delete": "stop an instance and delete it",
}


def add_instances_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `gateway instances` and their options to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    add_operator_options(actions.add_parser("list", help="all instances, in order of creation"))
    create = add_operator_options(actions.add_parser("create", help="create an instance and start it"))
    create.add_argument("name", help="its name, and that of its model")
    create.add_argument("model", help="hub id, or path of a folder below `admin.files`")
    create.add_argument("--kind", help="engine, or a name among `manager.commands`")
    create.add_argument("--upstream", help="the upstream that it joins (default: one of its own name)")
    create.add_argument("--device", help="such as cpu or cuda:0")
    create.add_argument("--port", type=int, help="port of a command's server (default: a free one)")
    for action, text in ACTIONS.items():
        add_operator_options(actions.add_parser(action, help=text)).add_argument(
            "name", help="as `list` shows it"
        )
    logs = add_operator_options(
        actions.add_parser("logs", help="the last lines that an instance has written")
    )
    logs.add_argument("name", help="as `list` shows it")
    logs.add_argument("--lines", type=int, default=LINES, metavar="N", help=f"default: {LINES}")


def run_instances(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run an action; return 1 if the gateway cannot be reached or refuses the request."""
    return ask_gateway(options, environment, lambda client, _: _run(options, client), TIMEOUT_S)


def _run(options: argparse.Namespace, client: GatewayClient) -> None:
    """Run an action. Raises: RequestRefused, GatewayUnavailable."""
    path = f"{PATH}/{quote(options.name, safe='')}" if "name" in options else PATH
    match options.action:
        case "list":
            _show(client.get(PATH, list[InstanceInfo]), as_json=options.json)
        case "create":
            _show_one(client.post(PATH, _settings(options), InstanceInfo), as_json=options.json)
        case "delete":
            client.send("DELETE", path)
            print_result({"deleted": options.name}, plain(f"deleted {options.name}"), as_json=options.json)
        case "logs":
            log = client.get(f"{path}/logs?start={-max(1, options.lines)}", LogSlice)
            # A log may contain what a terminal would interpret.
            print_result(log, "\n".join(map(plain, log.lines)), as_json=options.json)
        case action:
            _show_one(client.post(f"{path}/{action}", None, InstanceInfo), as_json=options.json)


def _settings(options: argparse.Namespace) -> dict[str, object]:
    settings = {name: getattr(options, name) for name in ("name", "kind", "upstream", "device", "port")}
    given = {name: value for name, value in settings.items() if value is not None}
    return {**given, "model_id": options.model}


def _show_one(instance: InstanceInfo, *, as_json: bool) -> None:
    if as_json:
        print_json(instance)
    else:
        _show([instance])


def _show(shown: Iterable[InstanceInfo], *, as_json: bool = False) -> None:
    if as_json:
        print_json(list(shown))
        return
    columns = ("instance", "kind", "model", "upstream", "status", "pid", "restarts", "uptime", "why")
    rows = [
        (
            instance.name,
            instance.kind,
            instance.model_id,
            instance.upstream,
            instance.status,
            NONE if instance.pid is None else str(instance.pid),
            str(instance.restarts),
            f"{instance.uptime_secs} s",
            instance.reason or NONE,
        )
        for instance in shown
    ]
    show_table(table_of(columns, rows))
