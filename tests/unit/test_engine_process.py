"""The boot message of an engine, at its first start and at a restart."""

import os
import pwd
from pathlib import Path

import msgspec
import pytest

from backends.contract import ModelState
from backends.recipe.options import RerankPrompt
from backends.torch import wire
from gateway.config.load import parse_config
from gateway.config.schema import EngineSettings, UpstreamSettings
from gateway.processes.child import Child
from gateway.processes.engine_process import EngineGroup, child_environment, worker_environment


def boot(child: Child) -> wire.EngineBoot:
    return msgspec.json.decode(child._boot(3), type=wire.EngineBoot)


def report(child: Child, model: str, state: ModelState) -> None:
    child._on_line(msgspec.json.encode(wire.State(model, state)))


def preloaded(child: Child) -> dict[str, bool]:
    return {model.name: model.preload for model in boot(child).models}


def test_restarted_engine_loads_the_models_that_were_loaded() -> None:
    upstreams = {
        name: UpstreamSettings(backend="torch", model="m", preload=name in {"eager", "left"})
        for name in ("eager", "lazy", "left", "broken")
    }
    child = EngineGroup("engine", "s", upstreams).child(EngineSettings(), {}, lambda _: None)
    first = preloaded(child)
    report(child, "lazy", "loading")
    report(child, "lazy", "loaded")
    report(child, "left", "loaded")
    report(child, "left", "unloaded")
    report(child, "broken", "loading")
    report(child, "broken", "failed")

    assert first == {"eager": True, "lazy": False, "left": True, "broken": False}
    assert preloaded(child) == {"eager": True, "lazy": True, "left": False, "broken": False}


def test_boot_message_has_bounds_and_model_settings() -> None:
    prompt = RerankPrompt("{query}{document}", "yes")
    settings = UpstreamSettings(
        backend="torch",
        model="m",
        when_loading="refuse",
        dtype="float32",
        rerank_template=prompt,
        adapter="law",
    )
    group = EngineGroup("engine", "/run/x.sock", {"a/b": settings})
    message = boot(group.child(EngineSettings(10, 2.5), {}, lambda _: None))

    assert (message.socket_path, message.memory_bytes, message.idle_s) == ("/run/x.sock", 10, 2.5)
    assert message.models == (
        wire.ModelBoot("a/b", "m", dtype="float32", waits=False, rerank_template=prompt, adapter="law"),
    )


def test_model_address_round_trips_any_name_and_path() -> None:
    address = wire.address_of("/tmp/odd #?%/e.sock", "a/b c%2F?")

    assert wire.socket_and_base(address) == ("/tmp/odd #?%/e.sock", "http://engine/a%2Fb%20c%252F%3F")


def test_variables_of_the_operator_replace_those_of_the_engine() -> None:
    group = EngineGroup("engine", "s", {"m": UpstreamSettings(backend="torch", model="m")})
    given = child_environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "TEI_KEY": "secret"})

    default = group.child(EngineSettings(), {}, lambda _: None)._spec.environment
    replaced = group.child(EngineSettings(), given, lambda _: None)._spec.environment

    assert default["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert replaced["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
    assert "TEI_KEY" not in replaced


def test_a_user_without_an_entry_gets_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "HOME" not in child_environment({"PATH": "/bin"})
    nobody = 2**31 - 77
    with pytest.raises(KeyError):
        pwd.getpwuid(nobody)
    monkeypatch.setattr(os, "getuid", lambda: nobody)

    assert {"PATH": "/bin", "HOME": "/", "USER": str(nobody)} == child_environment({"PATH": "/bin"})
    assert "/home/x" == child_environment({"HOME": "/home/x"})["HOME"]


def test_workers_inherit_credentials_of_clouds_in_use_only() -> None:
    cloud = {"AWS_ROLE_ARN": "role", "GOOGLE_APPLICATION_CREDENTIALS": "file", "TEI_KEY": "secret"}
    models = "models: {m: {upstream: x}}"
    bedrock = f"upstreams: {{x: {{backend: bedrock, model: m, bedrock: {{region: us-east-1}}}}}}\n{models}"
    tei = f"upstreams: {{x: {{backend: tei, replicas: ['http://t']}}}}\n{models}"

    def given(text: str) -> set[str]:
        return cloud.keys() & worker_environment(cloud, parse_config(text, {}, Path()))

    assert {"AWS_ROLE_ARN"} == given(bedrock)
    assert set() == given(tei)
    assert {"ALL_PROXY"} <= child_environment({"ALL_PROXY": "http://proxy"}).keys()
