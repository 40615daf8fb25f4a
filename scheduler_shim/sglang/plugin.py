"""The plugin: what SGLang finds under its entry point, and how a scheduler gets its backend.

Owns the name of the backend and the order in which its parts are made. SGLang only logs what goes
wrong in a plugin and then calls the backend "not registered"; so `register` does next to nothing,
and whatever hinders is said when the backend is built, where it ends the start with its reason.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from scheduler_shim.sglang.versions import Unsupported, check_version, supported_range

BACKEND: Final = "treecored"


def register() -> None:
    """SGLang's entry point: offer the backend under `--radix-cache-backend treecored`."""
    try:
        registry = importlib.import_module("sglang.srt.mem_cache.registry")
        offer = registry.register_radix_cache_backend
    except (ImportError, AttributeError) as error:
        raise Unsupported(
            f"this SGLang takes no cache backends from outside ({error}); {supported_range()}"
        ) from error
    offer(BACKEND, factory)


def factory(context: Any) -> Any:
    """Build the cache of one scheduler. `context`: SGLang's TreeCacheBuildContext.

    Raises with one sentence for whatever cannot be served: the engine does not start then.
    """
    check_version(str(importlib.import_module("sglang").__version__))
    try:
        build = importlib.import_module("scheduler_shim.sglang.build")
    except ImportError as error:
        raise Unsupported(
            f"treecored's parts for SGLang cannot be loaded ({error}); "
            "run pip install 'treecored[sglang]' in SGLang's environment"
        ) from error
    return build.build_cache(context)
