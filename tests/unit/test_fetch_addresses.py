"""Addresses of pictures: the forms that may be fetched, and all others refused before a connection."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import FetchSettings
from gateway.media.addresses import Target, check_ips, is_public, redirected, rules_of, target_of

RULES = rules_of(FetchSettings(hosts=("*",)))
BOTH = rules_of(FetchSettings(hosts=("a.example", "*.b.example", "8.8.8.8"), schemes=("https", "http")))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://a.example", Target("https", "a.example", 443, "/")),
        ("HTTPS://A.Example./x?y=%20#z", Target("https", "a.example", 443, "/x?y=%20")),
        ("http://a.example:80/x", Target("http", "a.example", 80, "/x")),
        ("http://a.example:443/x", Target("http", "a.example", 443, "/x")),
        ("https://c.d.b.example/", Target("https", "c.d.b.example", 443, "/")),
        ("https://8.8.8.8/", Target("https", "8.8.8.8", 443, "/")),
    ],
)
def test_an_allowed_address_has_one_reading(url: str, target: Target) -> None:
    assert target == target_of(url, BOTH)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://a.example/", "not of https"),
        ("file:///etc/passwd", "not of https"),
        ("gopher://a.example:70/_x", "not of https"),
        ("http://a.example/", "not of https"),
        ("//a.example/", "not of https"),
        ("https:a.example", "no valid host"),
        ("https:///x", "no valid host"),
        ("https://user@a.example/", "user name"),
        ("https://user:secret@a.example/", "user name"),
        ("https://a.example@169.254.169.254/", "user name"),
        ("https://a.example:443@10.0.0.1/", "user name"),
        ("https://@a.example/", "user name"),
        ("https://a.example:22/", "port"),
        ("https://a.example:0/", "port"),
        ("https://a.example:99999/", "port"),
        ("https://a.example:/", "host and port"),
        ("https://a.example:x/", "host and port"),
        ("https://a.example:443:443/", "host and port"),
        ("https://[::1/", "not a URL"),
        ("https://::1/", "host and port"),
        ("https://[fe80::1%25eth0]/", "invalid IPv6"),
        ("https://[::ffff:127.0.0.1]/", "host that"),
        ("https://[v1.x]/", "IPv6|not a URL"),
        ("https://127.0.0.1/", "host that"),
        ("https://127.1/", "unusual form"),
        ("https://0177.0.0.1/", "unusual form"),
        ("https://0x7f.0.0.1/", "host that|unusual form"),
        ("https://0x7f000001/", "unusual form"),
        ("https://2130706433/", "unusual form"),
        ("https://017700000001/", "unusual form"),
        ("https://127.0.0.1./", "host that"),
        ("https://127.0.0.0x1/", "unusual form"),
        ("https://1.2.3.4.5/", "unusual form"),
        ("https://0/", "unusual form"),
        ("https://256.1.1.1/", "unusual form"),
        ("https://169.254.169.254/latest/meta-data/", "host that"),
        ("https://a.example\\@10.0.0.1/", "characters"),
        ("https://a.example\r\nhost: b/", "characters"),
        ("https://a.example/\t", "characters"),
        (" https://a.example/", "characters"),
        ("https://a.example/ x", "characters"),
        ("https://ａ.example/", "characters"),
        ("https://127。0。0。1/", "characters"),
        ("https://①②⑦.0.0.1/", "characters"),
        ("https://a%2eexample/", "valid host"),
        ("https://a..example/", "valid host"),
        ("https://-a.example/", "valid host"),
        ("https://" + "a" * 64 + ".example/", "valid host"),
        ("https://" + "a." * 127 + "example/", "valid host"),
        ("https://a.example/" + "x" * 2048, "more than 2048"),
        ("", "characters"),
    ],
)
def test_an_address_with_another_reading_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        target_of(url, RULES)


@pytest.mark.parametrize(
    "url", ["https://x.a.example", "https://b.example", "https://xb.example", "https://a.example.evil.org"]
)
def test_a_host_is_listed_by_itself(url: str) -> None:
    with pytest.raises(ValueError, match=r"media\.fetch\.hosts"):
        target_of(url, BOTH)


@pytest.mark.parametrize(
    "ip",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.169.254",
        "169.254.170.2",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "no address",
    ],
)
def test_an_ip_that_is_not_public_is_refused(ip: str) -> None:
    with pytest.raises(ValueError, match=r"media\.fetch\.private"):
        check_ips([ip], ())
    with pytest.raises(ValueError, match=r"media\.fetch\.private"):
        check_ips(["8.8.8.8", ip], ())


@pytest.mark.parametrize("ip", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"])
def test_a_public_ip_is_allowed(ip: str) -> None:
    check_ips([ip], ())


def test_a_private_network_is_allowed_by_name() -> None:
    check_ips(["10.1.2.3", "8.8.8.8"], [ip_network("10.1.0.0/16")])
    with pytest.raises(ValueError, match="not public"):
        check_ips(["::ffff:10.1.2.3"], [ip_network("10.1.0.0/16")])
    with pytest.raises(ValueError, match="no IP address"):
        check_ips([], ())


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://a.example/", "from https to http"),
        ("//evil.org/x", r"media\.fetch\.hosts"),
        ("https://user@a.example/", "user name"),
        ("file:///etc/passwd", "not of http"),
        ("data:image/png;base64,AAAA", "not of http"),
        ("https://a.example:22/", "port"),
        ("/x y", "characters"),
        ("https://[/", "not a URL"),
        ("\\\\evil.org", "characters"),
    ],
)
def test_a_redirect_is_checked_like_an_address(location: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        redirected(Target("https", "a.example", 443, "/x"), location, BOTH)


def test_a_redirect_may_be_relative() -> None:
    first = Target("https", "a.example", 443, "/x/y?z")
    assert Target("https", "a.example", 443, "/x/w") == redirected(first, "w", BOTH)
    assert Target("https", "c.b.example", 443, "/w") == redirected(first, "//c.b.example/w", BOTH)


@given(st.text(max_size=60) | st.builds("https://{}/{}".format, st.text(max_size=30), st.text(max_size=30)))
def test_any_text_is_read_or_refused(url: str) -> None:
    try:
        target = target_of(url, RULES)
    except ValueError:
        return
    # What is sent is one line of ASCII, and means the same when it is read again.
    assert target == target_of(target.url, RULES)
    assert target.url.isascii()
    assert not set(" \r\n\t\\@") & set(target.authority)


@given(st.ip_addresses())
def test_no_ip_is_public_that_python_calls_private(ip: object) -> None:
    address = ip_address(str(ip))
    if is_public(address):
        assert not address.is_private
        assert not address.is_multicast
