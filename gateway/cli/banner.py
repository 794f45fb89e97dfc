"""What a person sees when the gateway is up: address, models, key, and a line to paste."""

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from gateway import __version__


class FirstKey(msgspec.Struct, frozen=True):
    """The key of a gateway without tenants; made: nobody knows it yet, so it is printed once.

    waits: Redis has not told yet whether it holds tenants.
    """

    key: str
    made: bool
    waits: bool = False


def show_banner(report: dict[str, Any], address: str, first_key: FirstKey | None) -> None:
    """report: the worker's `Ready`, as plain values."""
    # A URL that is listened on everywhere is reached here by loopback.
    url = address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    # Piped, there is no width to fit into.
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(f"\n  [bold]Embedding gateway[/] {__version__}   [cyan]{url}[/]   docs at {url}/docs\n")
    console.print(_models(report["models"]))
    console.print()
    if first_key is None:
        key = "$KEY"
        console.print("  [bold]key[/]   one of the tenants', in router.yaml or made by `gateway keys create`")
    elif first_key.made:
        key = first_key.key
        console.print(f"  [bold]key[/]   {key}   (made now and shown once; GATEWAY_API_KEY sets your own)")
    else:
        key = "$GATEWAY_API_KEY"
        when = ", once Redis is back, if it holds no tenants and no keys" if first_key.waits else ""
        console.print(f"  [bold]key[/]   the one in GATEWAY_API_KEY{when}")
    # Printed as it is: markup would read brackets in it.
    print(_curl(report["models"], url, key), flush=True)


def _models(models: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for one in models:
        facts = [
            one["backend"],
            one.get("dtype") or "",
            f"{one['dimensions']} dimensions" if one.get("dimensions") else "",
            f"{one['max_input_tokens']} tokens" if one.get("max_input_tokens") else "",
        ]
        operations = " ".join(one["operations"]) or "[red]not reached yet[/]"
        table.add_row(f"  [bold]{one['name']}[/]", operations, ", ".join(filter(None, facts)))
    return table


def _curl(models: list[dict[str, Any]], url: str, key: str) -> str:
    able = [one["name"] for one in models if "embed" in one["operations"]]
    header = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    if not able:
        return f"\n  curl {url}/v1/models {header}\n"
    body = f'{{"model": "{able[0]}", "input": "Hello, world"}}'
    return f"\n  curl {url}/v1/embeddings {header} -d '{body}'\n"
