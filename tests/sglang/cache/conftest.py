"""SGLang is imported here once: its imports warn of what is missing on a machine without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

if importlib.util.find_spec("sglang") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.srt.mem_cache.memory_pool")
        importlib.import_module("sglang.srt.mem_cache.allocator")
