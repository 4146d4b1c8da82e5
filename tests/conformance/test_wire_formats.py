"""Wire formats: the native code gives the specification's bits, errors stay within half a step, and damage stays visible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.digest import payload_digest
from kernels.native_build import NativeUnavailable, load_library
from kernels.wire import NativeWireBlocks, WireBlocks, select_wire_blocks, wire_block_bytes

FORMATS = ("int8", "fp8")


def native_missing() -> str:
    try:
        load_library()
    except NativeUnavailable as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(bool(native_missing()), reason=native_missing() or "native kernels are there")


def make_cache(shape: Sequence[int], dtype: torch.dtype, seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn((*shape[:4], 1, 1), generator=generator))
    return (torch.randn(tuple(shape), generator=generator) * scale).to(dtype)


def slab_for(blocks: WireBlocks, count: int) -> memoryview:
    return memoryview(bytearray(b"\xa5" * (blocks.block_bytes * count)))


@needs_native
@pytest.mark.parametrize("wire_format", FORMATS)
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 6), st.integers(1, 3), st.just(2), st.integers(1, 3), st.integers(1, 17), st.sampled_from([1, 3, 8, 64])
    ),
    is_bf16=st.booleans(),
    seed=st.integers(0, 1 << 20),
    spread=st.sampled_from([0.0, 1.0, 25.0]),
)
def test_native_and_torch_give_the_same_bytes_digests_and_blocks(
    wire_format: str, shape: tuple[int, ...], is_bf16: bool, seed: int, spread: float
) -> None:
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    cache = make_cache(shape, dtype, seed, spread)
    ids = [int(i) for i in np.random.default_rng(seed).permutation(shape[0])]
    caches = (cache.clone(), cache.clone())
    ends = (WireBlocks(caches[0], wire_format), NativeWireBlocks(caches[1], wire_format))
    slabs = [slab_for(end, len(ids)) for end in ends]
    digests = [end.gather(ids, slab) for end, slab in zip(ends, slabs, strict=True)]
    assert bytes(slabs[0]) == bytes(slabs[1])
    assert digests[0] == digests[1] == payload_digest(slabs[0])
    back = ids[::-1]
    assert ends[0].scatter(slabs[0], back) == ends[1].scatter(slabs[1], back) == digests[0]
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@needs_native
def test_every_fp8_code_decodes_as_torch_says_and_encodes_back() -> None:
    # Without the two NaN codes, which are never produced: values are clamped, and a damaged group carries its NaN in the scale.
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    cache = values.view(1, 1, 1, 1, 1, -1).expand(1, 1, 2, 1, 1, -1).contiguous()
    for end in (WireBlocks(cache.clone(), "fp8"), NativeWireBlocks(cache.clone(), "fp8")):
        slab = slab_for(end, 1)
        end.gather([0], slab)
        assert list(slab[: len(codes)]) == codes
        end.scatter(slab, [0])
        assert torch.equal(end._cache, cache)


@pytest.mark.parametrize("choice", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("wire_format", FORMATS)
def test_the_error_is_at_most_half_a_step_of_the_group(choice: str, wire_format: str) -> None:
    cache = make_cache((4, 3, 2, 2, 16, 64), torch.float32, seed=1, spread=2.0)
    before = cache.clone()
    end = select_wire_blocks(cache, wire_format, choice)
    slab = slab_for(end, 4)
    end.gather([0, 1, 2, 3], slab)
    end.scatter(slab, [0, 1, 2, 3])
    amax = before.abs().amax(dim=(4, 5), keepdim=True)
    error = (cache - before).abs()
    if wire_format == "int8":
        limit = amax / 127 * 0.5001
    else:  # three bits of mantissa; below the smallest normal a fixed step
        limit = torch.maximum(before.abs() / 16, amax / 448 * 2**-10) * 1.0001
    assert (error <= limit).all() and error.max() > 0


@pytest.mark.parametrize("choice", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zero_and_damage_stays_visible_in_its_own_head_only(choice: str, wire_format: str, dtype: torch.dtype) -> None:
    cache = make_cache((1, 1, 2, 4, 16, 8), dtype, seed=2)
    cache[0, 0, 0, 0] = 0
    cache[0, 0, 0, 1] = 1e-35
    cache[0, 0, 0, 2, 3, 3] = torch.inf
    cache[0, 0, 1, 3, 0, 0] = torch.nan
    end = select_wire_blocks(cache, wire_format, choice)
    slab = slab_for(end, 1)
    end.gather([0], slab)
    end.scatter(slab, [0])
    assert (cache[0, 0, 0, :2] == 0).all()
    assert cache[0, 0, 0, 2].isnan().all() and cache[0, 0, 1, 3].isnan().all()
    assert cache[0, 0, 0, 3].isfinite().all() and cache[0, 0, 1, :3].isfinite().all()


@pytest.mark.parametrize("choice", ["reference", pytest.param("native", marks=needs_native)])
def test_wrong_ids_and_slabs_are_refused_before_anything_is_touched(choice: str) -> None:
    end = select_wire_blocks(make_cache((3, 1, 2, 1, 4, 4), torch.float32, seed=3), "int8", choice)
    slab = slab_for(end, 2)
    for ids in ([], [3], [-1], [0, 1, 2]):
        with pytest.raises(ValueError):
            end.gather(ids, slab)
    with pytest.raises(ValueError, match="distinct"):
        end.scatter(slab, [1, 1])
    with pytest.raises(ValueError, match="read-only"):
        end.gather([0], slab.toreadonly())
    with pytest.raises(ValueError, match="no wire format"):
        select_wire_blocks(make_cache((1, 1, 2, 1, 1, 1), torch.float32, seed=0), "int4", choice)
    assert bytes(slab) == b"\xa5" * len(slab)


def test_a_wire_block_takes_about_half_the_bytes() -> None:
    assert wire_block_bytes(30 * 2 * 3, 16 * 64) == 185_088  # of 368,640
    assert wire_block_bytes(32 * 2 * 8, 16 * 128) == 1_050_624  # of 2,097,152
