"""Report of the latest results: the table in loadtest/README.md, and pictures.

    .venv/bin/python -m loadtest.report [--out loadtest-results]

`loadtest/results.json` keeps the latest figure of every measure. New results replace figures of the same run,
subject and measure; all other figures stay, with their own date and commit.
"""

from collections.abc import Iterable, Sequence

import msgspec

from loadtest import results, tables
from loadtest.results import ROOT, RunResult

README = ROOT / "loadtest" / "README.md"
LATEST = ROOT / "loadtest" / "results.json"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->"
# Runs of the table, in this order. Comparisons of versions are not part of it.
RUNS = ("compare", "scenarios", "engine", "engine-large", "engine-rerank", "endurance")


def merged(latest: Sequence[RunResult], new: Iterable[RunResult]) -> list[RunResult]:
    """Return results in which newer figures have replaced older ones of the same run, subject and measure."""
    found = list(latest)
    for result in sorted(new, key=lambda result: result.date):
        if result.run not in RUNS:
            continue
        replaced = {(measure.subject, measure.name) for measure in result.measures}
        found = [_without(older, replaced) if older.run == result.run else older for older in found]
        found = [older for older in found if older.measures]
        found.append(msgspec.structs.replace(result, curves=[]))
    return sorted(found, key=lambda result: (RUNS.index(result.run), result.date))


def _without(result: RunResult, replaced: set[tuple[str, str]]) -> RunResult:
    measures = [measure for measure in result.measures if (measure.subject, measure.name) not in replaced]
    return msgspec.structs.replace(result, measures=measures)


def with_table(readme: str, latest: Sequence[RunResult]) -> str:
    """Return the document with the generated table between its markers.

    Raises: ValueError where a marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN.strip()} and {END} in the document")
    return f"{before}{BEGIN}\n{tables.markdown(latest)}\n{END}{after}"


def read_latest() -> list[RunResult]:
    """Return the figures of the README's table."""
    return msgspec.json.decode(LATEST.read_bytes(), type=list[RunResult])


def main() -> None:
    """Merge new results, write the table, draw the pictures."""
    parser = results.argument_parser(__doc__)
    parser.add_argument("--no-pictures", action="store_true", help="needs no matplotlib")
    options = parser.parse_args()
    new = results.read(options.out)
    latest = merged(read_latest(), new)
    LATEST.write_bytes(msgspec.json.format(msgspec.json.encode(latest), indent=1) + b"\n")
    README.write_text(with_table(README.read_text(), latest))
    print(f"{LATEST}\n{README}")
    if not options.no_pictures:
        from loadtest.pictures import draw

        newest = {result.run: result for result in new if result.curves}
        for result in newest.values():
            print(*draw(result, options.out), sep="\n")


if __name__ == "__main__":
    main()
