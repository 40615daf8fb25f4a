"""Namespaces: what must agree before two prompts may share pages, as a structured key.

Owns the key; never glues its parts together. Absent (None) differs from empty (""). The pool
fingerprint is taken from the pool's registration and never from a request.
"""

import msgspec

from directory.core import limits
from directory.core.errors import BadMessage, TooLarge


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its id and the version of its weights."""

    id: str
    version: int


class NamespaceKey(msgspec.Struct, frozen=True, array_like=True):
    """The part of a namespace that a request names; the pool adds its fingerprint.

    `wide`: token ids are 64-bit. `bigram`: each unit is a pair of neighbouring ids (EAGLE).
    """

    weight_epoch: int = 0
    cache_salt: str | None = None
    extra_key: str | None = None
    adapter: Adapter | None = None
    bigram: bool = False
    wide: bool = False

    @property
    def unit_bytes(self) -> int:
        """Bytes of one key unit in packed tokens: 4 or 8, twice that for bigrams."""
        return (8 if self.wide else 4) * (2 if self.bigram else 1)

    def check(self) -> None:
        """Raise `BadMessage` or `TooLarge` where a part is out of range."""
        if self.weight_epoch < 0:
            raise BadMessage(f"weight_epoch must not be negative, got {self.weight_epoch}")
        for name in ("cache_salt", "extra_key"):
            part: str | None = getattr(self, name)
            if part is not None and len(part) > limits.KEY_PART_CHARS_MAX:
                raise TooLarge(
                    f"{name} has {len(part)} characters, at most "
                    f"{limits.KEY_PART_CHARS_MAX}; pass a digest of it instead"
                )
        if self.adapter is not None and len(self.adapter.id) > limits.KEY_PART_CHARS_MAX:
            raise TooLarge(
                f"adapter id has {len(self.adapter.id)} characters, at most "
                f"{limits.KEY_PART_CHARS_MAX}"
            )


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything that must agree before two schedulers may read one another's bytes.

    A group leaves `tp_rank` and `pp_rank` at 0: its host page holds the shards of all ranks. Ranks
    that register as instances of their own name them, for each holds another shard. `weights`: what
    tells the weights of equally named models apart; `overrides`: settings that change what the
    model's files say; `engine`: the program, where two of them may compute differently.
    """

    model: str
    revision: str | None = None
    weight_dtype: str | None = None
    quantisation: str | None = None
    kv_dtype: str = "uint8"
    kv_scales: str | None = None
    layer_count: int = 0
    layer_kind: str = "mha"
    heads: int = 0
    head_dim: int = 0
    page_size: int = 1
    layout: str = ""
    tp_size: int = 1
    pp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    weights: str | None = None
    overrides: str | None = None
    engine: str | None = None

    def encode(self) -> bytes:
        """Return the canonical form (JSON): equal exactly where every field is.

        It is compared whole, never by a digest: two schedulers whose digests collide would read
        one another's bytes.
        """
        return msgspec.json.encode(self, order="deterministic")
