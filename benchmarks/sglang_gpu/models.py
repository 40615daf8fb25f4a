"""Llama models of three sizes with random weights, from a seed: written where they are run.

Owns the shapes. `tiny` is the tests' model for dry runs; `small` and `wide` are bf16 with weights
wide enough that every token counts, so a wrong page changes what follows; `large` has the shape of
an 8B model (13 GiB of it are written), for what takes how long. Drawn on a GPU where there is one.
With torch, in SGLang's own environment: `python -m benchmarks.sglang_gpu.models NAME FOLDER`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.sglang import model as tests_model

VOCABULARY: Final = 1024
SEED: Final = 11
WRITERS: Final = 4
"""Files written at a time."""

SHAPES: Final[dict[str, dict[str, int]]] = {
    "small": {"layers": 4, "hidden": 512, "inner": 1024, "heads": 8, "kv_heads": 2, "dim": 64},
    "wide": {"layers": 8, "hidden": 1024, "inner": 2048, "heads": 8, "kv_heads": 8, "dim": 128},
    "large": {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "dim": 128},
}


def make(name: str, folder: Path, python: Path | str = sys.executable) -> Path:
    """Write a model into a new folder, in a process of its own, because that imports torch."""
    if not (folder / "config.json").exists():
        if name == "tiny":
            return tests_model.llama(folder)
        command = [str(python), "-m", "benchmarks.sglang_gpu.models", name, str(folder)]
        subprocess.run(command, check=True)
    return folder


def without_weights(name: str, folder: Path) -> Path:
    """Its config alone, for SGLang's `load_format="dummy"`: what takes how long is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name)), encoding="utf-8")
    return folder


def config_of(name: str) -> dict[str, Any]:
    """What transformers calls its config."""
    shape = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": shape["hidden"], "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": shape["dim"],
        "vocab_size": VOCABULARY, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def kv_bytes(name: str) -> int:
    """Bytes of one token's KV; 0 for the tests' model, which nobody asks for."""
    shape = SHAPES.get(name, {})
    return 2 * 2 * shape.get("layers", 0) * shape.get("kv_heads", 0) * shape.get("dim", 0)


def write(name: str, folder: Path) -> None:
    """Write config and weights; the config last, so that what has one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(name, folder)
    (folder / "config.json").write_text(json.dumps(config_of(name)), encoding="utf-8")


def _write_weights(name: str, folder: Path) -> None:
    """One file a layer, because safetensors wants the whole of a file in memory."""
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[name]

    hidden, inner, dim = shape["hidden"], shape["inner"], shape["dim"]
    wide, narrow = shape["heads"] * dim, shape["kv_heads"] * dim

    def matrices(seed: int, sizes: dict[str, tuple[int, int, float]]) -> dict[str, Any]:
        # Unit variance in, unit variance out, and attention that looks at few tokens.
        draw = torch.Generator(device).manual_seed(seed)
        return {
            name: (
                torch.randn((rows, columns), generator=draw, device=device)
                * (scale or 1.5 / columns**0.5)
            ).to(torch.bfloat16).cpu()
            for name, (rows, columns, scale) in sizes.items()
        }  # fmt: skip

    def save(file: str, tensors: dict[str, Any], norms: list[str]) -> None:
        ones = {name: torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
        save_file({**tensors, **ones}, str(folder / file), metadata={"format": "pt"})

    def layer(number: int) -> None:
        here = f"model.layers.{number}"
        sizes = {
            f"{here}.self_attn.q_proj.weight": (wide, hidden, 0.0),
            f"{here}.self_attn.k_proj.weight": (narrow, hidden, 0.0),
            f"{here}.self_attn.v_proj.weight": (narrow, hidden, 0.0),
            f"{here}.self_attn.o_proj.weight": (hidden, wide, 0.0),
            f"{here}.mlp.gate_proj.weight": (inner, hidden, 0.0),
            f"{here}.mlp.up_proj.weight": (inner, hidden, 0.0),
            f"{here}.mlp.down_proj.weight": (hidden, inner, 0.0),
        }
        norms = [f"{here}.input_layernorm.weight", f"{here}.post_attention_layernorm.weight"]
        save(f"model-{number}.safetensors", matrices(SEED + 1 + number, sizes), norms)

    ends = {"lm_head.weight": (VOCABULARY, hidden, 0.0)}
    ends["model.embed_tokens.weight"] = (VOCABULARY, hidden, 1.0)
    save("model.safetensors", matrices(SEED, ends), ["model.norm.weight"])
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(layer, range(shape["layers"])))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
