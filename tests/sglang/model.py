"""Tiny models with random weights, written without torch: the same bytes on every machine.

Owns the recipes. The weights are wide enough (standard deviation 0.2) that every token of a prompt
counts: a wrong page of KV changes the tokens that follow. float32, so that how a prompt is cut into
batches changes no token.
"""

import json
import random
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 1024
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 2, 4, 2, 32
LATENT, ROPE_DIM = 64, 16

Shapes = dict[str, tuple[int, ...]]


def llama(folder: Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """A Llama of half a million weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _write(folder, config, _llama_shapes(layers), seed)


def deepseek(folder: Path, *, seed: int = 0) -> Path:
    """A DeepSeek V2 with latent attention (MLA), every layer dense."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "torch_dtype": "float32", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS, "n_routed_experts": 2, "n_shared_experts": 1,
        "num_experts_per_tok": 1, "moe_layer_freq": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "q_lora_rank": None, "kv_lora_rank": LATENT,
        "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": ROPE_DIM, "v_head_dim": HEAD_DIM,
        "head_dim": ROPE_DIM, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 4096,
                         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    return _write(folder, config, _deepseek_shapes(), seed)


def adapter(folder: Path, *, seed: int = 1, rank: int = 4) -> Path:
    """A LoRA adapter for `llama`, strong enough to change what comes out."""
    names = ("q_proj", "v_proj")
    shapes: Shapes = {}
    for layer in range(LAYERS):
        for name, rows in zip(names, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), strict=True):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes[f"{key}.lora_A.weight"] = (rank, HIDDEN)
            shapes[f"{key}.lora_B.weight"] = (rows, rank)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "r": rank,
        "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "target_modules": list(names),
        "inference_mode": True, "fan_in_fan_out": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_tensors(folder / "adapter_model.safetensors", shapes, seed)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt; another seed gives one that differs from the first token on."""
    draw = random.Random(seed)
    return [3 + seed % 100, *(draw.randrange(3, VOCABULARY) for _ in range(length - 1))]


def _llama_shapes(layers: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        shapes |= {
            f"{here}.input_layernorm.weight": (HIDDEN,),
            f"{here}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{here}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{here}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{here}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{here}.post_attention_layernorm.weight": (HIDDEN,),
            f"{here}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{here}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{here}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def _deepseek_shapes() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        attention = f"{here}.self_attn"
        shapes |= {
            f"{here}.input_layernorm.weight": (HIDDEN,),
            f"{attention}.q_proj.weight": (HEADS * (HEAD_DIM + ROPE_DIM), HIDDEN),
            f"{attention}.kv_a_proj_with_mqa.weight": (LATENT + ROPE_DIM, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": (LATENT,),
            f"{attention}.kv_b_proj.weight": (HEADS * 2 * HEAD_DIM, LATENT),
            f"{attention}.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{here}.post_attention_layernorm.weight": (HIDDEN,),
            f"{here}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{here}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{here}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def _write(folder: Path, config: dict[str, object], shapes: Shapes, seed: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_tensors(folder / "model.safetensors", shapes, seed)
    return folder


def _write_tensors(path: Path, shapes: Shapes, seed: int) -> None:
    """The safetensors format: the header's length, the header, the bytes of all tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * _count(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in _values(shapes, seed):
            file.write(tensor.tobytes())


def _values(shapes: Shapes, seed: int) -> "Iterator[array[float]]":
    draw = random.Random(seed)
    for name, shape in shapes.items():
        if len(shape) == 1:
            yield array("f", [1.0] * _count(shape))  # norms
        else:
            deviation = 1.0 if "lora" in name else 0.2
            yield array("f", [draw.gauss(0.0, deviation) for _ in range(_count(shape))])


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
