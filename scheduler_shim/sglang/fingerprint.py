"""What must agree before two SGLang schedulers may read one another's pages.

Owns how that is found out, from SGLang's own configuration and the loaded model. In doubt two
schedulers are kept apart: a false difference costs hits, a false agreement answers with another
model's thoughts. Nothing here is a digest, because a digest must never decide what is equal.

Weights are known by their *files*: device, inode, size and both times of every weight and JSON
file of the model's folder. The same files are the same weights; copies of them are not (they
might be another model with equal names, shapes and sizes), unless the operator gives both
schedulers one model id and thereby promises it. Weights that came from nowhere on this machine
belong to their scheduler alone.
"""

from __future__ import annotations

import importlib
import os
import uuid
from pathlib import Path
from typing import Any, Final

import msgspec

from directory.core.errors import CapacityError
from directory.core.limits import FINGERPRINT_BYTES_MAX
from directory.core.namespace import Fingerprint
from transfer.layout import PoolLayout

SUFFIXES: Final = (
    ".bin", ".gguf", ".json", ".npz", ".pt", ".pth", ".safetensors", ".tensors", ".yaml"
)  # fmt: skip
"""Files of a model's folder that say what it computes, weights and configuration alike."""
WITHOUT_FILES: Final = ("dummy",)
ELSEWHERE: Final = ("remote", "remote_instance")
"""Load formats whose weights do not come from the model's folder."""


def fingerprint_of(
    context: Any,
    kvcache: Any,
    layout: PoolLayout,
    *,
    model_id: str = "",
    share_versions: bool = False,
) -> Fingerprint:
    """The fingerprint of one scheduler's pool.

    `context`: SGLang's TreeCacheBuildContext. `model_id`: the operator's promise that equal ids
    are equal weights. `share_versions`: pages may pass between versions of SGLang. They compute
    the same keys and values but for rounding, and but for mended errors, which is why it is off.
    Raises `CapacityError` for a model of so many files that they cannot be listed.
    """
    args, model = context.server_args, context.model_config
    made = Fingerprint(
        model=model_id or os.path.realpath(str(args.model_path)),
        revision=None if model_id else args.revision,
        weight_dtype=_plain(model.dtype),
        quantisation=_quantisation(args, model),
        kv_dtype=_plain(kvcache.dtype),
        kv_scales=_kv_scales(context, kvcache),
        layer_count=int(kvcache.layer_num),
        layer_kind="mla" if hasattr(kvcache, "kv_buffer") else "mha",
        heads=int(getattr(kvcache, "head_num", 1)),
        head_dim=int(getattr(kvcache, "head_dim", 0) or getattr(kvcache, "kv_cache_dim", 0)),
        page_size=layout.page_size,
        layout=layout.canonical(),
        tp_size=int(context.tp_size),
        pp_size=int(context.params.pp_size),
        tp_rank=int(context.tp_rank),
        pp_rank=int(context.params.pp_rank),
        weights=None if model_id else weights_of(args, model),
        overrides=_overrides(args),
        engine="sglang" if share_versions else f"sglang {sglang_version()}",
    )
    if len(made.encode()) > FINGERPRINT_BYTES_MAX:
        raise CapacityError(
            f"the model's files and layers take {len(made.encode())} bytes to list, at most "
            f"{FINGERPRINT_BYTES_MAX}; give the model an id with TREECORED_MODEL_ID"
        )
    return made


def weights_of(args: Any, model: Any) -> str:
    """The identity of the weights as text; unlike any other one when it cannot be found out."""
    load_format = str(getattr(args.load_format, "value", args.load_format))
    if load_format in ELSEWHERE:
        return _nobody_elses(f"load format {load_format}")
    folder = model_files(str(model.model_path), args)
    if folder is None:
        return _nobody_elses(f"no files of {args.model_path}")
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    found = [identity_of(file) for file in files if file.suffix in SUFFIXES and file.is_file()]
    if load_format in WITHOUT_FILES:
        # SGLang's dummy weights follow from shapes and a seed; its own seed is drawn by chance
        # unless it was given.
        return msgspec.json.encode([load_format, args.random_seed, found]).decode()
    if not any(not name.endswith((".json", ".yaml")) for name, *_ in found):
        return _nobody_elses(f"no weight files in {folder}")
    return msgspec.json.encode([load_format, found]).decode()


def model_files(path: str, args: Any) -> Path | None:
    """The model's folder (or its one file) on this machine, or None."""
    if os.path.exists(path):
        return Path(path)
    try:
        hub = importlib.import_module("huggingface_hub")
        return Path(
            hub.snapshot_download(
                path,
                revision=args.revision,
                cache_dir=getattr(args, "download_dir", None),
                local_files_only=True,
            )
        )
    except (ImportError, OSError, ValueError):
        return None


def sglang_version() -> str:
    """The version of SGLang that runs here."""
    return str(importlib.import_module("sglang").__version__)


def identity_of(file: Path) -> tuple[str, int, int, int, int, int]:
    """What changes with a file: name, device, inode, size, times of content and of record."""
    status = file.stat()  # of what a symbolic link leads to: hubs keep weights so
    return (
        file.name,
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _nobody_elses(why: str) -> str:
    return f"unknown ({why}): {uuid.uuid4()}"


def _quantisation(args: Any, model: Any) -> str | None:
    parts = [model.quantization, getattr(args, "torchao_config", None) or None]
    return (
        msgspec.json.encode([str(part) for part in parts if part]).decode() if any(parts) else None
    )


def _overrides(args: Any) -> str | None:
    """What changes the configuration that stands in the model's files."""
    parts = {
        name: str(getattr(args, name, None))
        for name in ("json_model_override_args", "model_loader_extra_config", "model_impl")
        if getattr(args, name, None) not in (None, "", "{}", "auto")
    }
    return msgspec.json.encode(parts, order="sorted").decode() if parts else None


def _kv_scales(context: Any, kvcache: Any) -> str | None:
    """The scales that the loaded model writes its keys and values with, layer by layer.

    They may come from the checkpoint or from a file of their own, so the model is asked. None:
    keys and values are stored as they are.
    """
    if kvcache.store_dtype == kvcache.dtype:
        return None
    network = context.tp_worker.model_runner.model
    scales = [
        (name, [_number(getattr(part, scale, None)) for scale in ("k_scale", "v_scale")])
        for name, part in network.named_modules()
        if hasattr(part, "k_scale") and hasattr(part, "layer_id")
    ]
    return msgspec.json.encode(scales).decode()


def _number(scale: Any) -> str | None:
    if scale is None:
        return None
    return str(scale.tolist()) if hasattr(scale, "tolist") else str(scale)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
