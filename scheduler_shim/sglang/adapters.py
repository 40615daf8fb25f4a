"""Versions of LoRA adapters: what tells two adapters of one id apart.

Owns a picture of the adapters that were loaded when the engine started. SGLang gives an adapter
of `--lora-paths` the same id wherever name and path are the same (from 0.5.23 on), though the files
there may have been changed in between; all others get an id that nobody else has. It must never
call two adapters equal that it has not seen to be: one that it does not know is this engine's own.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from scheduler_shim.sglang.fingerprint import identity_of

VERSION_BITS: Final = 62
"""A version travels as a signed 64-bit integer and is never negative."""


def adapter_versions(tp_worker: Any) -> Callable[[str], int]:
    """Look at the adapters that are loaded now; returns the version of an adapter's id.

    The identity of the files (device, inode, size, times) is the version, as it is of the model's.
    """
    runner = getattr(tp_worker, "model_runner", None)
    references = getattr(getattr(runner, "lora_manager", None), "lora_refs", None) or {}
    known = {
        name: version
        for name, reference in references.items()
        if (version := _version(str(reference.lora_path))) is not None
    }
    own = secrets.randbits(VERSION_BITS)
    return lambda adapter: known.get(adapter, own)


def _version(path: str) -> int | None:
    folder = Path(path)
    if not folder.is_dir():
        return None  # a hub's name, or tensors that were sent: nobody can tell later
    found = [identity_of(file) for file in sorted(folder.iterdir()) if file.is_file()]
    digest = hashlib.sha256(msgspec.json.encode(found)).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - VERSION_BITS)
