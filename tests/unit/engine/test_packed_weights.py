"""Packed weights that workers of a host share: the file gives back what was packed, and nothing about it can stop a worker."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.model_spec import parse_model_spec
from engine.models.llama_weights import TensorSource, pack_linears
from engine.weights.packed_cache import FILES_MAX, PackedWeights, load_packed
from engine.weights.packed_file import PackedFileError, map_packed_file, write_packed_file
from engine.weights.tensor_names import required_tensors
from kernels.native import NativeOps
from kernels.ops import PackedLinear
from tests.native_instructions import HERE, native_ops

SPEC = parse_model_spec(
    {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 50,
        "vocab_size": 70,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    None,
)


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return native_ops(next(iter(HERE)))


class Model:
    """Random tensors for SPEC, and how often they were opened."""

    def __init__(self, folder: Path, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.folder, self.dtype, self.num_packed = folder, dtype, 0
        self.tensors = {
            name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in required_tensors(SPEC).items()
        }
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"only its size and time are looked at")

    @contextmanager
    def open(self) -> Iterator[TensorSource]:
        def take(name: str) -> torch.Tensor:
            self.num_packed += 1
            return self.tensors[name]

        yield take

    def load(self, ops: NativeOps, cache: Path | None, fingerprint: str = "f") -> PackedWeights:
        cpu = torch.device("cpu")
        return load_packed(self.folder, SPEC, fingerprint, self.dtype, cpu, ops, self.open, cache, weights_bytes_min=0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(tmp_path / "model", request.param)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed"


def assert_equal(a: PackedLinear, b: PackedLinear) -> None:
    assert (a.num_outputs, a.num_inputs, a.layout) == (b.num_outputs, b.num_inputs, b.layout)
    assert a.weight.dtype == b.weight.dtype and torch.equal(a.weight, b.weight)
    assert (a.bias is None) == (b.bias is None) and (a.bias is None or b.bias is None or torch.equal(a.bias, b.bias))


def assert_right(loaded: PackedWeights, model: Model, ops: NativeOps) -> None:
    with model.open() as source:
        expected = dict(pack_linears(SPEC, source, ops))
    assert loaded.linears.keys() == expected.keys()
    for name, packed in expected.items():
        assert_equal(loaded.linears[name], packed)


def packed_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.packed"))


def test_a_second_worker_maps_what_the_first_packed(model: Model, ops: NativeOps, cache: Path) -> None:
    first = model.load(ops, cache)
    assert first.where.startswith(f"shared: {packed_files(cache)[0]}")
    assert_right(first, model, ops)
    num_packed = model.num_packed
    second = model.load(ops, cache)
    assert model.num_packed - num_packed < 10, "more than the one layer that is compared was packed again"
    assert_right(second, model, ops)
    x = torch.randn(3, 40).to(model.dtype)
    assert torch.equal(ops.linear(x, first.linears["0.qkv"]), ops.linear(x, second.linears["0.qkv"]))


def test_the_file_is_private_and_nothing_else_is_left(model: Model, ops: NativeOps, cache: Path) -> None:
    model.load(ops, cache)
    (path,) = packed_files(cache)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {file.name for file in cache.iterdir()} == {path.name, "lock"}


@pytest.mark.parametrize("damage", ["cut", "flip", "footer", "empty"])
def test_a_damaged_file_is_written_again(model: Model, ops: NativeOps, cache: Path, damage: str) -> None:
    model.load(ops, cache)
    (path,) = packed_files(cache)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[5000] ^= 1
    elif damage == "footer":
        data[-1] ^= 1
    path.write_bytes(data[: {"cut": len(data) // 2, "empty": 0}.get(damage, len(data))])
    loaded = model.load(ops, cache)
    assert loaded.where.startswith("shared")
    assert_right(loaded, model, ops)
    assert_right(model.load(ops, cache), model, ops)


def test_other_weights_get_another_file(model: Model, ops: NativeOps, cache: Path, tmp_path: Path) -> None:
    model.load(ops, cache)
    other = Model(tmp_path / "other", model.dtype, seed=1)
    assert_right(other.load(ops, cache, "g"), other, ops)
    assert len(packed_files(cache)) == 2


def test_weights_changed_under_the_same_name_are_found_out(model: Model, ops: NativeOps, cache: Path) -> None:
    model.load(ops, cache)
    model.tensors = Model(model.folder, model.dtype, seed=2).tensors
    (path,) = packed_files(cache)
    info = path.stat()
    os.utime(model.folder / "model.safetensors", ns=(info.st_mtime_ns, info.st_mtime_ns))
    assert_right(model.load(ops, cache), model, ops)


def test_old_files_go_and_the_number_is_bounded(model: Model, ops: NativeOps, cache: Path) -> None:
    for index in range(FILES_MAX + 3):
        model.load(ops, cache, str(index))
        for path in packed_files(cache):  # a clock too coarse for the order of use
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**9,) * 2)
    assert len(packed_files(cache)) == FILES_MAX


def test_a_cache_that_cannot_be_used_only_costs_memory(
    model: Model, ops: NativeOps, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    loaded = model.load(ops, tmp_path / "file" / "packed")
    assert loaded.where.startswith("packed in memory") and "Not a directory" in loaded.where
    assert_right(loaded, model, ops)
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert "with mode 777" in model.load(ops, cache).where
    cache.chmod(0o700)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.weights.packed_cache.write_packed_file", full)
    loaded = model.load(ops, cache)
    assert "No space left on device" in loaded.where and not packed_files(cache)
    assert_right(loaded, model, ops)
    assert model.load(ops, None).where == "packed in memory: no cache asked for"


def test_a_small_model_is_not_worth_a_file(model: Model, ops: NativeOps, cache: Path) -> None:
    cpu = torch.device("cpu")
    loaded = load_packed(model.folder, SPEC, "f", model.dtype, cpu, ops, model.open, cache)
    assert "KiB of weights are below" in loaded.where and not cache.exists()


def test_a_file_says_what_is_wrong_with_it(tmp_path: Path, ops: NativeOps) -> None:
    path = tmp_path / "x.packed"
    write_packed_file(path, "key", [("a", ops.pack_linear(torch.randn(5, 7), torch.randn(5)))])
    assert set(map_packed_file(path, "key", 1)) == {"a"}
    with pytest.raises(PackedFileError, match=re.escape("was written for 'key', not for 'other'")):
        map_packed_file(path, "other", 1)
    path.chmod(0o666)
    with pytest.raises(PackedFileError, match="with mode 666"):
        map_packed_file(path, "key", 1)
    with pytest.raises(FileNotFoundError):
        map_packed_file(tmp_path / "nothing", "key", 1)
