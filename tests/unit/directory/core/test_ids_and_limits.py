"""Small numbers and relations that everything else leans on."""

from directory.core import limits
from directory.core.ids import HOST, STORE, Owner, is_pool


def test_only_positive_places_are_pools() -> None:
    assert [is_pool(place) for place in (1, 2, 0, HOST, STORE)] == [True, True, False, False, False]


def test_owners_are_equal_only_in_pool_request_and_attempt() -> None:
    owners = {Owner(1, "r", 1), Owner(2, "r", 1), Owner(1, "q", 1), Owner(1, "r", 2)}
    assert len(owners) == 4
    assert Owner(1, "r", 1) in owners


def test_every_limit_is_a_positive_number() -> None:
    found = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert found
    assert all(isinstance(value, int) and value > 0 for value in found.values())
