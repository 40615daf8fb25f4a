"""Names of namespaces for people: digests, and what they stand for without giving secrets away.

Owns the wording of a namespace's fields and a table of those met. Salts and extra keys are secrets
of whoever asks: they appear as digests only, which tells equal from different and nothing else.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec

from directory.analytics.record import namespace_digest
from directory.core.limits import NAMESPACES_MAX
from directory.core.namespace import Fingerprint, NamespaceKey

SECRET_CHARS: Final = 12
TEXT_CHARS_MAX: Final = 200

_fingerprints = msgspec.json.Decoder(Fingerprint)
_encoder = msgspec.msgpack.Encoder()


class Names:
    """Digests of namespaces by what they are made of."""

    def __init__(self) -> None:
        self._digests: dict[tuple[bytes, NamespaceKey], bytes] = {}

    def digest(self, fingerprint: bytes, key: NamespaceKey) -> bytes:
        """The digest of a namespace, 8 bytes."""
        found = self._digests.get((fingerprint, key))
        if found is None:
            if len(self._digests) >= NAMESPACES_MAX:
                del self._digests[next(iter(self._digests))]
            found = namespace_digest(fingerprint + b"\0" + _encoder.encode(key))
            self._digests[fingerprint, key] = found
        return found


def fields_of(fingerprint: bytes, key: NamespaceKey) -> dict[str, str]:
    """A namespace field by field; what is absent is left out, what is secret is a digest."""
    fields: dict[str, str] = {}
    try:
        known = _fingerprints.decode(fingerprint)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields["fingerprint"] = _secret(fingerprint)
    else:
        for name, value in msgspec.structs.asdict(known).items():
            if value is not None:
                fields[name] = str(value)[:TEXT_CHARS_MAX]
    fields["weight_epoch"] = str(key.weight_epoch)
    if key.cache_salt is not None:
        fields["cache_salt"] = _secret(key.cache_salt.encode())
    if key.extra_key is not None:
        fields["extra_key"] = _secret(key.extra_key.encode())
    if key.adapter is not None:
        fields["adapter"] = f"{key.adapter.id}@{key.adapter.version}"[:TEXT_CHARS_MAX]
    fields["bigram"], fields["wide"] = str(key.bigram).lower(), str(key.wide).lower()
    return fields


def _secret(part: bytes) -> str:
    return blake2b(part, digest_size=SECRET_CHARS // 2).hexdigest() if part else ""
