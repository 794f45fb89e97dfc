"""TLS files that cannot be read: the problem names the setting of the file at fault."""

from pathlib import Path

import pytest

from gateway.config.local_files import upstream_tls_problems
from gateway.config.schema import UpstreamTls


@pytest.mark.parametrize("missing", ["certificate", "private_key"])
def test_problem_names_the_missing_file(tmp_path: Path, missing: str) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("certificate", "private_key")}
    for name, path in files.items():
        if name != missing:
            path.write_text("")
    settings = UpstreamTls(certificate=str(files["certificate"]), private_key=str(files["private_key"]))

    [problem] = upstream_tls_problems(settings, "upstreams.u.tls")
    assert f"upstreams.u.tls.{missing}" in str(problem)
    assert "No such file or directory" in str(problem)
