"""Loading weights from a Hugging Face folder: completeness, clear refusals, progress, laziness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner import load_engine_model
from engine.model_spec import ModelError, ModelSpec, parse_model_spec
from engine.weights.model_files import load_model_spec, weight_files, weights_fingerprint
from engine.weights.safetensors_files import SafetensorsFolder
from engine.weights.tensor_names import required_tensors
from kernels.reference import ReferenceOps

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
SPEC: ModelSpec = parse_model_spec(CONFIG)
CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in required_tensors(SPEC).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path) -> None:
    values = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(values)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: values[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> SafetensorsFolder:
    return SafetensorsFolder(folder, SPEC, dtype, CPU, None)


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_is_found_in_one_file_or_in_shards(folder: Path, sharded: bool) -> None:
    if sharded:
        shard(folder)
    with open_folder(folder) as weights:
        for name, value in tensors().items():
            assert torch.equal(weights.take(name), value)
    with open_folder(folder, torch.bfloat16) as weights:
        assert torch.equal(weights.take("model.norm.weight"), tensors()["model.norm.weight"].bfloat16())


def test_progress_grows_to_the_bytes_of_all_tensors(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_engine_model(
        folder,
        dtype="float32",
        device="cpu",
        block_size=4,
        num_blocks=2,
        ops=ReferenceOps(),
        progress=lambda *call: calls.append(call),
    )
    total = sum(value.nbytes for value in tensors().values())
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def test_tensors_outside_the_architecture_are_ignored(folder: Path) -> None:
    save_file(tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    assert open_folder(folder).total_bytes == sum(value.nbytes for value in tensors().values())


def test_missing_misshapen_and_mistyped_tensors_are_named(folder: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.bias"
    values = tensors()
    save_file({key: value for key, value in values.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"1 tensors are missing, the first is {name}"):
        open_folder(folder)
    save_file(values | {name: torch.zeros(31)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} has shape \(31,\), the configuration says \(32,\)"):
        open_folder(folder)
    save_file(values | {name: torch.zeros(32, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name} has type I8"):
        open_folder(folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a complete safetensors file"):
        open_folder(folder)
    with pytest.raises(ModelError):
        load_engine_model(folder, dtype="float32", device="cpu", block_size=4, num_blocks=2, ops=ReferenceOps())


def test_folders_without_usable_files_are_refused(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: named by model\.safetensors\.index\.json but missing"):
        weight_files(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    with pytest.raises(ModelError, match="not a plain file name"):
        weight_files(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map is missing"):
        weight_files(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="holds neither"):
        weight_files(folder)
    with pytest.raises(ModelError, match="no such folder"):
        load_model_spec(folder / "nowhere")


def test_the_fingerprint_ignores_the_path_and_sees_the_configuration(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert weights_fingerprint(folder, SPEC) == weights_fingerprint(other, SPEC)
    assert weights_fingerprint(folder, SPEC) != weights_fingerprint(folder, parse_model_spec(CONFIG | {"rope_theta": 5e5}))


def test_the_pool_is_sized_by_blocks_or_bytes(folder: Path) -> None:
    def blocks(num_blocks: int | None, kv_bytes: int | None) -> int:
        loaded = load_engine_model(
            folder, dtype="bfloat16", device="cpu", block_size=4, num_blocks=num_blocks, kv_bytes=kv_bytes, ops=ReferenceOps()
        )
        return loaded.kv_cache.num_blocks

    block_bytes = 2 * 2 * 2 * 4 * 8 * 2
    assert blocks(3, 100 * block_bytes) == 3
    assert blocks(None, 5 * block_bytes + 1) == 5
    with pytest.raises(ValueError, match=f"needs {block_bytes} bytes"):
        blocks(None, block_bytes - 1)
    with pytest.raises(ValueError, match="needs num_blocks or kv_bytes"):
        blocks(None, None)
    with pytest.raises(ModelError, match="dtype 'int8' is not supported"):
        load_engine_model(folder, dtype="int8", device="cpu", block_size=4, num_blocks=1)
