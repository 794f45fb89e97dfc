"""Reports on a fleet: states, and which member differs from most others in what."""

import msgspec

from gateway.config.digest import section_digests
from gateway.config.identity import Identity
from gateway.fleet.members import Member, SeenMember, report_of
from tests.unit.test_addition_settings import file

SAME = {"models": "m1", "upstreams": "u1"}


def member(name: str, **fields: object) -> Member:
    whole = Member(Identity(name, name, 1, "0.0.0.0:8080", 100.0), "1.0", 1, SAME)
    return msgspec.structs.replace(whole, **fields)


def differs(*seen: SeenMember, this: str) -> dict[str, tuple[str, ...]]:
    return {each.id: each.differs for each in report_of(seen, this, 200.0, shared=True).members}


def test_the_minority_differs_by_version_and_section() -> None:
    odd = member("b", version="1.1", configuration={"models": "m2", "upstreams": "u1", "cache": "c"})
    seen = [SeenMember(each, 1.0) for each in (member("a"), odd, member("c"))]

    assert {"a": (), "b": ("version", "cache", "models"), "c": ()} == differs(*seen, this="b")


def test_of_two_gateways_the_one_that_answers_is_right() -> None:
    seen = [SeenMember(member("a"), 1.0), SeenMember(member("b", configuration={"models": "m1"}), 1.0)]

    assert {"a": (), "b": ("upstreams",)} == differs(*seen, this="a")
    assert {"a": ("upstreams",), "b": ()} == differs(*seen, this="b")


def test_gateways_that_stop_or_are_silent_decide_nothing() -> None:
    new = {"models": "m2", "upstreams": "u1"}
    seen = [
        SeenMember(member("a", is_stopping=True), 1.0),
        SeenMember(member("b"), 40.0),
        SeenMember(member("c", configuration=new, reasons=("waiting for: bge",)), 1.0),
        SeenMember(member("d", drained_since_s=5.0, reasons=("waiting for: bge",)), 1.0),
        SeenMember(member("e", configuration=new), 1.0),
    ]
    report = report_of(seen, "e", 200.0, shared=True)

    assert ["stopping", "silent", "not_ready", "drained", "ready"] == [each.state for each in report.members]
    assert [("models",)] * 2 == [report.members[0].differs, report.members[3].differs]
    assert (1, 2) == (report.versions, report.configurations)


def test_digests_ignore_what_belongs_to_one_host_and_reveal_no_secret() -> None:
    upstreams = "upstreams: {a: {backend: tei, replicas: [http://%s], api_key: top-secret}}\n"
    text = f"{upstreams}models: {{m: {{upstream: a}}}}\n"
    parsed = [
        section_digests(file(extra + text % host))
        for extra, host in (
            ("listen: 127.0.0.1:1\n", "a"),
            (
                "listen: 127.0.0.1:2\nworkers: 1\nadmin: {listen: '127.0.0.1:3'}\nstate_dir: /tmp/x\n",
                "a",
            ),
            ("lame_duck_s: 2\n", "b"),
        )
    ]

    assert parsed[0] == parsed[1]
    assert {"lame_duck_s", "upstreams"} == {
        name for name in parsed[2] if parsed[2][name] != parsed[0].get(name)
    }
    assert "secret" not in str(parsed)
    assert section_digests(file(), ignored=file().upstreams.keys()) != section_digests(file())
