"""Paths as keys: equal by all tokens, whatever is hashed of them."""

from hypothesis import given
from hypothesis import strategies as st

from directory.core.namespace import NamespaceKey
from scheduler_shim.paths import HASHED_BYTES, TokenPath

KEY, OTHER = NamespaceKey(), NamespaceKey(cache_salt="s")


def test_paths_that_differ_where_nothing_is_hashed_are_two() -> None:
    tail = bytes(2 * HASHED_BYTES)
    one, other = TokenPath(KEY, b"a" + tail), TokenPath(KEY, b"b" + tail)
    assert hash(one) == hash(other)
    assert {one: 1, other: 2}[TokenPath(KEY, b"a" + tail)] == 1
    assert len({one, other, TokenPath(OTHER, b"a" + tail)}) == 3


@given(
    st.lists(
        st.tuples(st.sampled_from([KEY, OTHER]), st.text("ab", max_size=9).map(str.encode)),
        max_size=30,
    )
)
def test_a_table_of_paths_is_one_of_namespaces_and_tokens(
    paths: list[tuple[NamespaceKey, bytes]],
) -> None:
    pad = b"c" * HASHED_BYTES
    table = {
        TokenPath(key, bytes(bytearray(tokens + pad))): at for at, (key, tokens) in enumerate(paths)
    }
    wanted = {path: at for at, path in enumerate(paths)}
    assert [(path.key, path.tokens.removesuffix(pad)) for path in table] == list(wanted)
    assert list(table.values()) == list(wanted.values())
    assert TokenPath(KEY, b"") != (KEY, b"")
