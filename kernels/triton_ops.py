"""The operations as Triton kernels on a GPU, or on the CPU in Triton's interpreter for tests.

Owns the checks before each launch and the choice of the matrix product; the arithmetic lies in the other triton_* modules.
Attention, norms, rotary embedding, KV write, gate, logits, greedy sampling and block copies are Triton; the embedding lookup is
torch; `linear` is the vendor's library, or Triton with a fixed order of additions when batch invariance is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton

from kernels import checks, triton_guard, triton_rows
from kernels.ops import AttentionMeta, DecoderWeights, Draw, FusedDecoder, PackedLinear
from kernels.sampling import sample_row
from kernels.triton_attention import paged_attention
from kernels.triton_blocks import BlockCopies
from kernels.triton_decoder import TritonDecoder
from kernels.triton_launch import INTERPRETED, TritonUnavailable, require_usable
from kernels.triton_matmul import invariant_linear
from kernels.triton_sampling import largest_logits

LAYOUT = "rows"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonOps:
    """Raises TritonUnavailable when `device` or `dtype` is not served.

    With `is_batch_invariant` a row's result depends on nothing but the row. Without it that holds for everything except
    `linear`: cuBLAS chooses its order of additions by the number of rows, so neighbours may change the last bits, and with
    them a token where two logits are nearly equal. Indexes on the CPU are looked at before a launch; on a GPU the look would
    stall the device, there a bad slot stops it with an error and block tables are trusted (the engine's own allocator writes them).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, is_batch_invariant: bool) -> None:
        if dtype not in DTYPES:
            raise TritonUnavailable(f"Triton kernels serve {', '.join(map(str, DTYPES))}, not {dtype}")
        require_usable(device)
        self._device = device
        self._is_batch_invariant = is_batch_invariant
        self._copies = BlockCopies(device)
        self._num_processors = 1
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
            # fp32 sums with one rounding at the end, as every implementation: by default cuBLAS may add parts in half precision.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    @property
    def name(self) -> str:
        return "triton"

    def describe(self) -> str:
        where = "interpreter on the cpu" if INTERPRETED else torch.cuda.get_device_name(self._device)
        products = (
            "batch-invariant matrix products" if self._is_batch_invariant else "cuBLAS matrix products, not batch-invariant"
        )
        return f"triton {triton.__version__} ({where}): {products}"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        checks.check_pack(weight, bias)
        return PackedLinear(weight, bias, weight.shape[0], weight.shape[1], LAYOUT)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        checks.check_linear(x, packed, LAYOUT)
        self._check_device(x)
        if self._is_batch_invariant:
            return invariant_linear(x, packed.weight, packed.bias, x.dtype)
        return torch.nn.functional.linear(x, packed.weight, packed.bias)

    def logits(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        checks.check_linear(x, packed, LAYOUT)
        self._check_device(x)
        return invariant_linear(x, packed.weight, packed.bias, torch.float32)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Greedy rows are chosen on the device; rows with a draw come to the host, where sums keep the order of the specification."""
        checks.check_sample(logits, len(draws))
        self._check_device(logits)
        largest, lowest_ids = (values.tolist() for values in largest_logits(logits))
        token_ids = []
        for row, draw in enumerate(draws):
            if not math.isfinite(largest[row]):
                token_ids.append(-1)
            elif draw.temperature == 0.0:
                token_ids.append(lowest_ids[row])
            else:
                token_ids.append(sample_row(logits[row].cpu().numpy(), draw))
        return checks.check_sampled(token_ids)

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        checks.check_embedding(ids, table)
        self._check_device(table)
        triton_guard.check_range("token ids", ids, table.shape[0])
        return torch.nn.functional.embedding(ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        checks.check_norm(x, weight, rank=2)
        self._check_device(x)
        return triton_rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checks.check_norm(x, weight, rank=2)
        checks.check_tensor("residual", residual, x.dtype, x.shape)
        self._check_device(x)
        return triton_rows.add_rms_norm(x, residual, weight, eps)

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        checks.check_norm(x, weight, rank=3)
        self._check_device(x)
        return triton_rows.head_rms_norm(x, weight, eps)

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        checks.check_rope(q, k, cos, sin)
        self._check_device(q)
        triton_rows.rotate_(q, cos, sin)
        triton_rows.rotate_(k, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        checks.check_gate_up(gate_up)
        self._check_device(gate_up)
        return triton_rows.silu_mul(gate_up)

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
        checks.check_kv_write(k, v, cache, layer, slot_mapping)
        self._check_device(cache)
        triton_guard.check_slots(slot_mapping, cache)
        triton_rows.kv_write(k, v, cache, layer, slot_mapping)

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        checks.check_attention(q, cache, layer, meta, window)
        self._check_device(cache)
        triton_guard.check_batch(meta, cache)
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")
        return paged_attention(q, cache, layer, meta, scale, window, self._num_processors)

    def fuse_decoder(self, decoder: DecoderWeights) -> FusedDecoder:
        """The decoder with everything between the QKV projection and attention in one kernel."""
        return TritonDecoder(self, decoder)

    def gather_blocks(self, cache: torch.Tensor, block_ids: Sequence[int], out: memoryview) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, out, slab_is_written=True)
        self._check_device(cache)
        return self._copies.gather(cache, block_ids, out, num_bytes)

    def scatter_blocks(self, src: memoryview, cache: torch.Tensor, block_ids: Sequence[int]) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, src, slab_is_written=False)
        self._check_device(cache)
        return self._copies.scatter(src, cache, block_ids, num_bytes)

    def _check_device(self, tensor: torch.Tensor) -> None:
        """The other arguments lie where the first one does, or Triton refuses to launch."""
        if tensor.device.type != self._device.type:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} lies on {tensor.device}, these kernels run on {self._device}"
            )
