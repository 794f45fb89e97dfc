"""The banner of a started gateway: its addresses, models and key, and commands to paste."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway import __version__
from gateway.cli.first_key import FirstKey
from gateway.processes.messages import ModelSummary


def show_banner(
    models: Sequence[ModelSummary], address: str, admin_listen: str | None, first_key: FirstKey | None
) -> None:
    """Print the banner. address: base URL of the listener. admin_listen: of the operators' own, if any."""
    url = _reachable(address)
    scheme = address.partition("//")[0]
    page = f"{url if admin_listen is None else _reachable(f'{scheme}//{admin_listen}')}/ui"
    # A pipe has no width to fit into.
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(f"\n  [bold]Embedding gateway[/] {__version__}   [cyan]{url}[/]   docs at {url}/docs\n")
    console.print(_models_table(models))
    console.print()
    key = "$KEY" if first_key is None else first_key.shell_word
    console.print(f"  [bold]key[/]      {escape(_note_on_key(first_key))}")
    console.print(f"  [bold]console[/]  {page}")
    # Printed without rich, which would interpret the brackets as markup.
    print(f'\n  OpenAI(base_url="{url}/v1", api_key="<the key>")   # Python: from openai import OpenAI')
    print(_curl_command(models, url, key), flush=True)


def _reachable(address: str) -> str:
    """Return a base URL that works from here: by loopback, if the address means every interface."""
    return address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


def _note_on_key(first_key: FirstKey | None) -> str:
    if first_key is None:
        return "a tenant's key, in router.yaml or created by `gateway keys create`"
    when = ", once Redis is available, if it contains no tenants" if first_key.waits else ""
    return first_key.note + when


def _models_table(models: Sequence[ModelSummary]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for model in models:
        facts = [
            model.backend,
            model.dtype or "",
            f"{model.dimensions} dimensions" if model.dimensions else "",
            f"{model.max_input_tokens} tokens" if model.max_input_tokens else "",
        ]
        operations = " ".join(model.operations) or "[red]not reached yet[/]"
        table.add_row(f"  [bold]{model.name}[/]", operations, ", ".join(filter(None, facts)))
    return table


def _curl_command(models: Sequence[ModelSummary], url: str, key: str) -> str:
    embedders = [model.name for model in models if "embed" in model.operations]
    header = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    if not embedders:
        return f"\n  curl {url}/v1/models {header}\n"
    body = f'{{"model": "{embedders[0]}", "input": "Hello, world"}}'
    return f"\n  curl {url}/v1/embeddings {header} -d '{body}'\n"
