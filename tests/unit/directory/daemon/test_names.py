"""Names of namespaces: equal where the namespaces are, and without anybody's secrets."""

from directory.core.namespace import Adapter, Fingerprint, NamespaceKey
from directory.daemon.names import Names, fields_of

FINGERPRINT = Fingerprint(model="m", kv_dtype="bf16").encode()


def test_namespaces_that_differ_in_anything_have_different_digests() -> None:
    keys = [
        NamespaceKey(),
        NamespaceKey(weight_epoch=1),
        NamespaceKey(cache_salt=""),
        NamespaceKey(cache_salt="x"),
        NamespaceKey(extra_key="x"),
        NamespaceKey(adapter=Adapter("x", 1)),
        NamespaceKey(adapter=Adapter("x", 2)),
        NamespaceKey(wide=True),
    ]
    names = Names()
    digests = {names.digest(FINGERPRINT, key) for key in keys}
    digests |= {names.digest(b"other", key) for key in keys}
    assert len(digests) == 2 * len(keys)
    assert names.digest(FINGERPRINT, keys[3]) == Names().digest(FINGERPRINT, keys[3])


def test_fields_tell_absent_from_empty_and_equal_from_different_but_no_secret() -> None:
    plain = fields_of(FINGERPRINT, NamespaceKey())
    empty = fields_of(FINGERPRINT, NamespaceKey(cache_salt=""))
    red, blue = (fields_of(FINGERPRINT, NamespaceKey(cache_salt=salt)) for salt in ("red", "blue"))
    assert "cache_salt" not in plain
    assert empty["cache_salt"] == ""
    assert red["cache_salt"] != blue["cache_salt"]
    assert "red" not in str(red)
    assert (plain["model"], plain["kv_dtype"]) == ("m", "bf16")


def test_a_fingerprint_of_another_form_is_named_by_a_digest() -> None:
    fields = fields_of(b"\xff not json", NamespaceKey())
    assert set(fields) == {"fingerprint", "weight_epoch", "bigram", "wide"}
    assert "not json" not in fields["fingerprint"]
