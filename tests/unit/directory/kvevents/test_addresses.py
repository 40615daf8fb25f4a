"""Addresses of streams."""

import pytest

from directory.kvevents.addresses import Address, parse


def test_each_scheduler_has_three_ports_in_a_row() -> None:
    second = parse("tcp://127.0.0.1:5557").at(1)
    assert second == Address("127.0.0.1", 5560)
    assert second.events == "tcp://127.0.0.1:5560"
    assert second.replay == "tcp://127.0.0.1:5561"
    assert second.http == "http://127.0.0.1:5562"


@pytest.mark.parametrize(
    ("text", "bind_host", "http"),
    [
        ("tcp://*:5557", "", "http://127.0.0.1:5559"),
        ("tcp://[::1]:5557", "::1", "http://[::1]:5559"),
        ("tcp://0.0.0.0:5557", "0.0.0.0", "http://0.0.0.0:5559"),
    ],
)
def test_other_hosts_can_be_named(text: str, bind_host: str, http: str) -> None:
    address = parse(text)
    assert (address.bind_host, address.http) == (bind_host, http)


@pytest.mark.parametrize(
    "text", ["", "5557", "127.0.0.1:5557", "tcp://:5557", "tcp://a:0", "tcp://a:65534", "ipc://x"]
)
def test_what_is_no_address_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address|three ports"):
        parse(text)
