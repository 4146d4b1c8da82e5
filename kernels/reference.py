"""The operations in plain torch: the specification that faster implementations are compared with, and the fallback everywhere.

Owns clarity, not speed; runs on any torch device. Arithmetic in fp32 with one rounding at the end, whatever the tensors' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels import checks
from kernels.digest import payload_digest
from kernels.ops import AttentionMeta, DecoderWeights, Draw, PackedLinear
from kernels.sampling import sample_row

LAYOUT = "rows"
_LINEAR_CHUNK_VALUES = 1 << 22  # at most 16 MiB of weights widened to fp32 at a time


class ReferenceOps:
    """Plain torch. `reason` says why this and not something faster, for `describe`."""

    def __init__(self, reason: str = "asked for") -> None:
        self._reason = reason

    @property
    def name(self) -> str:
        return "reference"

    def describe(self) -> str:
        return f"reference (plain torch): {self._reason}"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        checks.check_pack(weight, bias)
        return PackedLinear(weight, bias, weight.shape[0], weight.shape[1], LAYOUT)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        checks.check_linear(x, packed, LAYOUT)
        if x.dtype == torch.float32 or x.device.type != "cpu":  # GPUs accumulate half precision in fp32 themselves
            return torch.nn.functional.linear(x, packed.weight, packed.bias)
        return self.logits(x, packed).to(x.dtype)

    def logits(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        checks.check_linear(x, packed, LAYOUT)
        weight, bias = packed.weight, packed.bias
        rows_per_chunk = max(1, _LINEAR_CHUNK_VALUES // max(1, packed.num_inputs))
        wide = x.float()
        out = torch.cat([wide @ chunk.float().T for chunk in torch.split(weight, rows_per_chunk)], dim=1)
        return out if bias is None else out + bias.float()

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        checks.check_sample(logits, len(draws))
        rows = logits.cpu().numpy()
        is_finite = [bool(np.isfinite(row.max())) for row in rows]
        tokens = [sample_row(row, draw) if ok else -1 for row, draw, ok in zip(rows, draws, is_finite, strict=True)]
        return checks.check_sampled(tokens)

    def fuse_decoder(self, decoder: DecoderWeights) -> None:
        """None: the operations one by one are the specification of every fused decoder."""

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        checks.check_embedding(ids, table)
        _check_range("token ids", ids, table.shape[0])
        return torch.nn.functional.embedding(ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        checks.check_norm(x, weight, rank=2)
        return _rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checks.check_norm(x, weight, rank=2)
        checks.check_tensor("residual", residual, x.dtype, x.shape)
        total = x + residual
        return _rms_norm(total, weight, eps), total

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        checks.check_norm(x, weight, rank=3)
        return _rms_norm(x, weight, eps)

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        checks.check_rope(q, k, cos, sin)
        half = cos.shape[1]
        cos, sin = cos[:, None, :], sin[:, None, :]
        for heads in (q, k):
            first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            heads[..., : 2 * half] = rotated.to(heads.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        checks.check_gate_up(gate_up)
        gate, up = gate_up.float().chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
        checks.check_kv_write(k, v, cache, layer, slot_mapping)
        num_blocks, block_size = cache.shape[0], cache.shape[4]
        _check_range(f"slots of {num_blocks} x {block_size}", slot_mapping, num_blocks * block_size)
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        cache[blocks, layer, 0, :, offsets] = k
        cache[blocks, layer, 1, :, offsets] = v

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        checks.check_attention(q, cache, layer, meta, window)
        out = torch.empty_like(q)
        num_kv_heads, block_size = cache.shape[3], cache.shape[4]
        starts, contexts = meta.query_starts.tolist(), meta.context_lens.tolist()
        if starts[0] != 0 or starts[-1] != meta.num_tokens or starts != sorted(starts):
            raise ValueError(f"query_starts {starts} do not cover the {meta.num_tokens} tokens of the step")
        for s, context in enumerate(contexts):
            rows = slice(starts[s], starts[s + 1])
            if rows.start == rows.stop:
                continue
            num_blocks = -(-context // block_size)
            if num_blocks > meta.block_tables.shape[1]:
                raise ValueError(f"sequence {s}: a context of {context} needs {num_blocks} blocks, its table has fewer")
            blocks = meta.block_tables[s, :num_blocks].long()
            _check_range(f"sequence {s}: block ids", blocks, cache.shape[0])
            _check_range(f"sequence {s}: positions", meta.positions[rows], context)
            pages = cache[blocks, layer].float()  # [blocks, 2, Hkv, block_size, D]
            keys, values = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, q.shape[2])[:, :, :context]
            positions = meta.positions[rows]
            key_index = torch.arange(context, device=q.device)
            visible = key_index[None, :] <= positions[:, None]
            if window is not None:
                visible &= key_index[None, :] > positions[:, None] - window
            queries = q[rows].float().view(-1, num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])  # [rows, Hkv, G, D]
            scores = torch.einsum("thgd,hkd->hgtk", queries, keys) * scale
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            out[rows] = torch.einsum("hgtk,hkd->thgd", weights, values).flatten(1, 2).to(q.dtype)
        return out

    def gather_blocks(self, cache: torch.Tensor, block_ids: Sequence[int], out: memoryview) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, out, slab_is_written=True)
        blocks = cache[torch.as_tensor(list(block_ids), dtype=torch.int64, device=cache.device)]
        payload = out.cast("B")[:num_bytes]
        payload[:] = _as_bytes(blocks.cpu()).data
        return payload_digest(payload)

    def scatter_blocks(self, src: memoryview, cache: torch.Tensor, block_ids: Sequence[int]) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, src, slab_is_written=False)
        payload = bytearray(src.cast("B")[:num_bytes])  # the digest is of the very bytes that are stored
        if num_bytes:
            blocks = torch.frombuffer(payload, dtype=cache.dtype).view(len(block_ids), *cache.shape[1:])
            cache[torch.as_tensor(list(block_ids), dtype=torch.int64, device=cache.device)] = blocks.to(cache.device)
        return payload_digest(payload)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy (numpy knows no bfloat16)."""
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _check_range(what: str, indexes: torch.Tensor, bound: int) -> None:
    """Refuses indexes outside 0..bound-1, on the CPU only: elsewhere the look would stall the device."""
    if indexes.device.type != "cpu" or not indexes.numel():
        return
    low, high = int(indexes.min()), int(indexes.max())
    if low < 0 or high >= bound:
        raise ValueError(f"{what}: {low}..{high} is outside 0..{bound - 1}")
