"""The built files of the console: made from the present sources, with the licenses of what they contain.

make console   # builds them; needs Node
"""

import hashlib
import json
import re
from pathlib import Path

import pytest

from backends.kinds import KINDS
from backends.openai.vendors import VENDORS
from gateway.config.schema import UpstreamSettings

# Those of kinds of server; a field ends in a semicolon where its hint goes on.
EXAMPLES = {
    "http://10.0.0.5:8000;",
    "http://10.0.0.5:8080;",
    "https://name.openai.azure.com",
    *(kind.address for kind in KINDS.values() if kind.address is not None),
}
# Settings that additions are refused; that of Azure, as no address of its own could permit it.
REFUSED = {"proxy", "trust_remote_code", "code_revision", "azure.entra"}
OPERATORS = Path(__file__).parents[2] / "gateway/api/operators"
SOURCES, PAGE = OPERATORS / "console", OPERATORS / "page"


def digest_of_sources() -> str:
    """Return the digest that the build writes into the first line of each script."""
    names = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"]
    names += [path.relative_to(SOURCES).as_posix() for path in (SOURCES / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\0".encode() + (SOURCES / name).read_bytes() + b"\0")
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["page.js", "docs.js"])
def test_the_built_script_is_current(name: str) -> None:
    first_line = (PAGE / name).read_text().partition("\n")[0]
    assert first_line.endswith(f"sha256 {digest_of_sources()}"), "run `make console`"


def test_the_packages_are_pinned_and_licensed() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    licenses = (PAGE / "licenses.txt").read_text()
    for name, version in (package["dependencies"] | package["devDependencies"]).items():
        assert re.fullmatch(r"[0-9.]+", version), name
        assert lock[f"node_modules/{name}"]["version"] == version
        assert lock[f"node_modules/{name}"]["integrity"]
    for name in package["dependencies"]:
        assert licenses.count(f"{name}\n\n") == 1, name
    granted = re.findall(r"Permission (?:is hereby granted|to use, copy, modify)", licenses)
    assert len(granted) >= len(package["dependencies"])


def test_no_request_leaves_the_gateway() -> None:
    for name in ("page.js", "page.css", "index.html", "docs.js", "docs.css", "docs.html"):
        text = (PAGE / name).read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        asked = {address for address in addresses if "www.w3.org" not in address}
        # Placeholders of a field show addresses of upstreams. A browser's test counts the requests.
        assert asked <= EXAMPLES, name


def test_the_form_of_an_upstream_has_each_kind_and_what_additions_may_set() -> None:
    form = (SOURCES / "src/pages/upstreams/form.ts").read_text()
    titles = form.split("export const BACKENDS", 1)[1].split("\n];", 1)[0]
    assert set(KINDS) == set(re.findall(r'^  \["(\w+)", ', titles, re.MULTILINE))
    [vendors] = re.findall(r"^const VENDORS = (\[.*\]);", form, re.MULTILINE)
    assert sorted(VENDORS) == json.loads(vendors)
    hosted = dict(re.findall(r'^  (\w+): "(https://[^"]+)",', form, re.MULTILINE))
    assert {kind.name: kind.address for kind in KINDS.values() if kind.address is not None} == hosted
    keys = re.findall(r'^(?:  \{|   ) key: "([\w.]+)"', form, re.MULTILINE)
    assert len(keys) > 20
    assert not REFUSED & set(keys)
    sections = {str(kind.name): kind.settings for kind in KINDS.values() if kind.settings is not None}
    for section, _, key in (key.partition(".") for key in keys):
        assert section in UpstreamSettings.__struct_fields__
        assert not key or key in sections[section].__struct_fields__, section


def test_the_form_offers_a_field_only_to_kinds_that_have_it() -> None:
    form = (SOURCES / "src/pages/upstreams/form.ts").read_text()
    [task] = re.findall(r'key: "task",.*?backends: (\[.*?\])', form, re.DOTALL)
    remote = {kind.name for kind in KINDS.values() if {"task", "replicas"} <= kind.keys}
    assert remote == set(json.loads(task))
    [servers] = re.findall(r"^const SERVERS = (\[.*\]);", form, re.MULTILINE)
    assert {kind.name for kind in KINDS.values() if "discover" in kind.keys} == set(json.loads(servers))
