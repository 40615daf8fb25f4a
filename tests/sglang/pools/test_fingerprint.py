"""Fingerprints from SGLang's configuration: equal for the same, unequal for all that differs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

import torch

from directory.core.errors import CapacityError
from directory.core.namespace import Fingerprint
from scheduler_shim.sglang import fingerprint as module
from scheduler_shim.sglang.buffers import find_tensors, layout_of
from tests.sglang.pools import support

pytestmark = pytest.mark.sglang


class Scale(torch.nn.Module):  # type: ignore[misc]
    """What SGLang's attention layers carry."""

    def __init__(self, k_scale: Any, v_scale: Any) -> None:
        super().__init__()
        self.layer_id = 0
        self.k_scale, self.v_scale = k_scale, v_scale


def fingerprint(
    folder: Path, *, kvcache: Any = None, model_id: str = "", share: bool = False, **args: Any
) -> Fingerprint:
    """The fingerprint of a scheduler with a model in a folder."""
    kvcache = support.mha(32, 16) if kvcache is None else kvcache
    context = support.context(support.allocator_of(kvcache), folder, **args)
    tensors = find_tensors(kvcache)
    sizes = tuple(part.nbytes for part in tensors)
    numbers = {id(part.tensor): at for at, part in enumerate(tensors)}
    layout = layout_of(tensors, 16, 3, lambda part: (numbers[id(part.tensor)], 0), sizes)
    return module.fingerprint_of(context, kvcache, layout, model_id=model_id, share_versions=share)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    return support.model_folder(tmp_path / "model")


def test_two_schedulers_of_one_folder_are_equal_however_it_is_named(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert fingerprint(folder) == fingerprint(folder) == fingerprint(link)


def test_equal_looking_folders_are_different_models_f1(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)  # names, sizes, contents and modification times are equal
    assert fingerprint(folder) != fingerprint(other)
    a, b = (fingerprint(at, model_id="the same") for at in (folder, other))
    assert a == b, "the operator promised it"


def test_weights_that_change_under_one_name_are_other_weights_f1(folder: Path) -> None:
    before = fingerprint(folder)
    weights = folder / "model.safetensors"
    times = (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=times)
    assert fingerprint(folder) != before, "the change time cannot be set back"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_every_file_that_says_what_is_computed_counts(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / "README.md").write_text("changed")
    assert fingerprint(folder) == before
    shutil.copy2(folder / name, folder / "copy")
    os.replace(folder / "copy", folder / name)
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    "args",
    [
        {"revision": "v2"},
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"torchao_config": "int4wo-128"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"model_loader_extra_config": '{"a": 1}'},
        {"model_impl": "transformers"},
        {"load_format": "dummy"},
        {"tp_size": 2},
        {"tp_rank": 1},
    ],
    ids=str,
)
def test_what_changes_the_bytes_changes_the_fingerprint_f1(
    folder: Path, args: dict[str, Any]
) -> None:
    assert fingerprint(folder, **args) == fingerprint(folder, **args)
    assert fingerprint(folder, **args) != fingerprint(folder)


def test_the_pool_itself_counts_f1(folder: Path) -> None:
    pools = [
        support.mha(32, 16),
        support.mha(32, 16, dtype=torch.float16),
        support.mha(32, 16, dtype=torch.float8_e4m3fn),
        support.mha(32, 16, dtype=torch.float8_e5m2),
        support.mha(32, 16, v_head_dim=4),
        support.mha(32, 16, start_layer=1, end_layer=3),
        support.mla(32, 16),
    ]
    prints = [fingerprint(folder, kvcache=kvcache).encode() for kvcache in pools]
    assert len(set(prints)) == len(prints)
    longer = fingerprint(folder, kvcache=support.mha(320, 16))
    assert longer.encode() == prints[0], "how many pages a pool has is its own affair"


def test_scales_are_those_that_the_model_has_loaded_f1(folder: Path) -> None:
    eight_bits = support.mha(32, 16, dtype=torch.float8_e4m3fn)
    networks = [
        torch.nn.Module(),
        torch.nn.Sequential(Scale(torch.tensor(0.5), torch.tensor(1.0))),
        torch.nn.Sequential(Scale(torch.tensor(0.25), torch.tensor(1.0))),
        torch.nn.Sequential(Scale(torch.tensor(0.5), None)),
    ]
    prints = [fingerprint(folder, kvcache=eight_bits, network=net) for net in networks]
    assert len({one.encode() for one in prints}) == len(prints)
    plain = [fingerprint(folder, network=net) for net in networks]
    assert len({one.encode() for one in plain}) == 1, "unused scales change no byte"


def test_dummy_weights_are_shared_only_under_one_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    one, same, other = (
        fingerprint(folder, load_format="dummy", random_seed=seed) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    "args", [{"load_format": "remote"}, {"load_format": "remote_instance"}], ids=str
)
def test_weights_from_elsewhere_are_nobody_elses(folder: Path, args: dict[str, Any]) -> None:
    assert fingerprint(folder, **args) != fingerprint(folder, **args)
    assert fingerprint(folder, model_id="m", **args) == fingerprint(folder, model_id="m", **args)


def test_a_model_without_files_here_is_nobody_elses(folder: Path) -> None:
    gone = folder / "gone"
    assert fingerprint(gone) != fingerprint(gone)
    (folder / "model.safetensors").unlink()
    assert fingerprint(folder) != fingerprint(folder), "there are no weights in it"


def test_a_model_that_is_one_file_is_known_by_it(folder: Path) -> None:
    file = folder / "model.gguf"
    file.write_bytes(b"gguf")
    assert fingerprint(file, load_format="gguf") == fingerprint(file, load_format="gguf")
    assert fingerprint(file, load_format="gguf") != fingerprint(folder, load_format="gguf")


def test_versions_of_sglang_are_kept_apart_unless_they_may_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, shared = fingerprint(folder), fingerprint(folder, share=True)
    assert before.engine == f"sglang {module.sglang_version()}"
    monkeypatch.setattr(module, "sglang_version", lambda: "0.0.1")
    assert fingerprint(folder) != before
    assert fingerprint(folder, share=True) == shared


def test_what_is_too_much_to_list_is_refused_with_the_cure(folder: Path) -> None:
    for number in range(900):
        (folder / f"model-{number:05}-of-00900.safetensors").touch()
    with pytest.raises(CapacityError, match="TREECORED_MODEL_ID"):
        fingerprint(folder)
    assert len(fingerprint(folder, model_id="m").encode()) < 4096


def test_it_is_a_text_that_an_operator_can_read(folder: Path) -> None:
    text = msgspec.json.decode(fingerprint(folder).encode())
    assert text["model"] == str(folder)
    assert (text["kv_dtype"], text["layer_kind"], text["layer_count"]) == ("bfloat16", "mha", 3)
    assert (text["heads"], text["head_dim"], text["kv_scales"]) == (2, 8, None)
    assert "model.safetensors" in text["weights"]
