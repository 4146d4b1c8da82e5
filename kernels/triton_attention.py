"""Causal attention over the paged KV cache as Triton kernels: prefill chunks, decode rows and mixtures in one launch.

Online softmax (arXiv 1805.02867) with split keys (as in Flash-Decoding) whose partition is fixed by absolute key index: tiles of
keys make chunks of 512, each chunk starts from nothing, chunks are merged in order. Whether one program merges its chunks or a
second kernel does never changes the arithmetic, and the tile of rows has one shape for all batches, so a row gets the same bits
as part of a long prefill, as a decode step and with any neighbours. Arguments were checked before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.ops import AttentionMeta
from kernels.triton_launch import IS_INTERPRETED, ROUND_EACH, aligned, dot_width, on_device, padded, rounded

CHUNK_KEYS = 512
_ROWS, _KEYS = {2: 64, 4: 32}, {2: 64, 4: 32}
"""Tile sizes by bytes of a value. A tile's rows are (query, head of the group) pairs; 64 fill the matrix unit once, so decode
pays for reading its keys, not for the empty rows."""
_PARTIAL_BYTES_MAX = 256 << 20
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Shape:
    """The extents that a kernel is compiled for: those of the model and its cache."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@triton.jit
def _merge(peak, total, out, chunk_peak, chunk_total, chunk_out, log_scale):
    """Running softmax states of R rows (peak [R], total [R], out [R, W]) with the states of the next chunk put in.

    A chunk in which a row sees nothing (its total is 0; NaN is not) leaves the row's state as it is, to the bit.
    """
    new_peak = tl.maximum(peak, chunk_peak)
    finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2((peak - finite_peak) * log_scale)
    chunk_weight = tl.exp2((chunk_peak - finite_peak) * log_scale)
    is_seen = chunk_total != 0.0
    new_total = tl.where(is_seen, total * weight + chunk_total * chunk_weight, total)
    new_out = tl.where(is_seen[:, None], out * weight[:, None] + chunk_out * chunk_weight[:, None], out)
    return tl.where(is_seen, new_peak, peak), new_total, new_out


@triton.jit
def _finished(total, out):
    return tl.div_rn(out, tl.where(total == 0.0, 1.0, total)[:, None])  # rows beyond the batch saw nothing


@triton.jit(do_not_specialize=["num_sequences", "blocks_max", "num_splits", "layer", "window"])
def _attend(
    q_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,
    partial_sums_ptr,
    positions_ptr,
    starts_ptr,
    tables_ptr,
    num_sequences,
    blocks_max,
    num_splits,
    layer,
    num_layers,
    window,
    log_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (i, h, z): the i-th tile of queries against KV head h; all chunks, or with several splits chunk z alone."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Sequence s owns the tiles from starts[s] // QUERIES + s on: the last s that begins at or before this tile.
    sequence = tile * 0
    beyond = sequence + num_sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        is_before = tl.load(starts_ptr + middle) // QUERIES + middle <= tile
        sequence = tl.where(is_before, middle, sequence)
        beyond = tl.where(is_before, beyond, middle)
    sequence_start = tl.load(starts_ptr + sequence)
    sequence_end = tl.load(starts_ptr + sequence + 1)
    first_query = sequence_start + (tile - sequence_start // QUERIES - sequence) * QUERIES
    if first_query >= sequence_end:
        return

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < QUERIES * GROUP) & (query < sequence_end)
    position = tl.load(positions_ptr + query, mask=is_row, other=-1).to(tl.int32)
    first_key = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    keys_end = tl.max(position, axis=0) + 1
    keys_begin = tl.min(tl.where(is_row, first_key, keys_end), axis=0)

    column = tl.arange(0, WIDTH)
    is_column = column < HEAD_DIM
    at = (query.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(q_ptr + at, mask=is_row[:, None] & is_column[None, :], other=0.0)
    if IS_INTERPRETED:  # the interpreter keeps bf16 as integers and cannot multiply them
        q = q.to(tl.float32)

    chunk_begin = keys_begin // CHUNK
    chunk_end = (keys_end + CHUNK - 1) // CHUNK
    if num_splits > 1:
        chunk_begin = tl.maximum(chunk_begin, tl.program_id(2))
        chunk_end = tl.minimum(chunk_end, tl.program_id(2) + 1)
        if chunk_begin >= chunk_end:
            return
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for chunk in range(chunk_begin, chunk_end):
        chunk_peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        chunk_total = tl.zeros((ROWS,), dtype=tl.float32)
        chunk_out = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        begin = tl.maximum(chunk * CHUNK, keys_begin // KEYS * KEYS)
        end = tl.minimum(chunk * CHUNK + CHUNK, keys_end)
        for start in range(begin, end, KEYS):
            key = start + tl.arange(0, KEYS)
            is_key = key < keys_end
            block = tl.load(tables_ptr + sequence.to(tl.int64) * blocks_max + key // BLOCK_SIZE, mask=is_key, other=0)
            plane = (block.to(tl.int64) * num_layers + layer) * 2 * NUM_KV_HEADS + kv_head
            place = (plane * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
            k = tl.load(cache_ptr + place[None, :] + column[:, None], mask=is_key[None, :] & is_column[:, None], other=0.0)
            v_at = cache_ptr + place[:, None] + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + column[None, :]
            v = tl.load(v_at, mask=is_key[:, None] & is_column[None, :], other=0.0)
            if IS_INTERPRETED:
                k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee")
            is_visible = (key[None, :] <= position[:, None]) & (key[None, :] >= first_key[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
            new_peak = tl.maximum(chunk_peak, tl.max(scores, axis=1))
            finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2((chunk_peak - finite_peak) * log_scale)
            weights = tl.exp2((scores - finite_peak[:, None]) * log_scale)
            chunk_total = chunk_total * decay + tl.sum(weights, axis=1)
            chunk_out = chunk_out * decay[:, None]
            if v.dtype == tl.float32:
                chunk_out = tl.dot(weights, v, chunk_out, input_precision="ieee")
            else:  # two terms keep 16 or more bits of the weights: one would round them to the dtype of V
                high = rounded(weights, v.dtype)
                chunk_out = tl.dot(high, v, chunk_out)
                chunk_out = tl.dot(rounded(weights - high.to(tl.float32), v.dtype), v, chunk_out)
            chunk_peak = new_peak
        peak, total, out = _merge(peak, total, out, chunk_peak, chunk_total, chunk_out, log_scale)

    if num_splits > 1:
        state = (query.to(tl.int64) * NUM_HEADS + head) * num_splits + tl.program_id(2)
        tl.store(partial_sums_ptr + state * 2, peak, mask=is_row)
        tl.store(partial_sums_ptr + state * 2 + 1, total, mask=is_row)
        at = state[:, None] * HEAD_DIM + column[None, :]
        tl.store(partial_ptr + at, out, mask=is_row[:, None] & is_column[None, :])
    else:
        out = _finished(total, out)
        tl.store(out_ptr + at, rounded(out, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_splits", "window"])
def _merge_splits(
    partial_ptr,
    partial_sums_ptr,
    out_ptr,
    positions_ptr,
    num_splits,
    window,
    log_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (t, h): the heads of one group of one token, over the chunks that the token sees."""
    query = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row = row < GROUP
    head = query * NUM_HEADS + tl.program_id(1) * GROUP + row
    column = tl.arange(0, WIDTH)
    inside = is_row[:, None] & (column < HEAD_DIM)[None, :]
    position = tl.load(positions_ptr + query).to(tl.int32)
    first_key = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for chunk in range(first_key // CHUNK, position // CHUNK + 1):
        state = head * num_splits + chunk
        chunk_peak = tl.load(partial_sums_ptr + state * 2, mask=is_row, other=float("-inf"))
        chunk_total = tl.load(partial_sums_ptr + state * 2 + 1, mask=is_row, other=0.0)
        chunk_out = tl.load(partial_ptr + state[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
        # A split's own state is already a merge of nothing and its chunk, which is that chunk to the bit.
        peak, total, out = _merge(peak, total, out, chunk_peak, chunk_total, chunk_out, log_scale)
    at = head[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + at, rounded(_finished(total, out), out_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    num_processors: int,
) -> torch.Tensor:
    """q [T, Hq, D] over the paged KV of one layer -> [T, Hq, D], as kernels/ops.py says.

    `num_processors` (multiprocessors of the device) decides whether chunks are spread over programs; it changes no bit.
    """
    out = torch.empty_like(q)
    if not meta.num_tokens:
        return out
    shape = _Shape(q.shape[1], cache.shape[3], cache.shape[4], cache.shape[5])
    rows = max(_ROWS[q.element_size()], padded(shape.group))
    num_tiles = meta.num_tokens // (rows // shape.group) + meta.num_sequences
    num_splits = _num_splits(shape, meta, num_tiles, num_processors)
    sums = torch.empty(
        meta.num_tokens * shape.num_heads * num_splits * 2 if num_splits > 1 else 0, dtype=torch.float32, device=q.device
    )
    partial = torch.empty(sums.numel() // 2 * shape.head_dim, dtype=torch.float32, device=q.device)
    extents = (num_splits, layer, cache.shape[1], window or 0, scale * _LOG2_E)
    width = dot_width(shape.head_dim)
    with on_device(q.device):
        _attend[(num_tiles, shape.num_kv_heads, num_splits)](
            aligned(q),
            cache,
            out,
            partial,
            sums,
            meta.positions,
            meta.query_starts,
            meta.block_tables,
            meta.num_sequences,
            meta.block_tables.shape[1],
            *extents,
            NUM_HEADS=shape.num_heads,
            NUM_KV_HEADS=shape.num_kv_heads,
            BLOCK_SIZE=shape.block_size,
            HEAD_DIM=shape.head_dim,
            WIDTH=width,
            ROWS=rows,
            KEYS=_KEYS[q.element_size()],
            CHUNK=CHUNK_KEYS,
            num_warps=4,
            num_stages=2,
            **ROUND_EACH,
        )
        if num_splits > 1:
            _merge_splits[(meta.num_tokens, shape.num_kv_heads)](
                partial,
                sums,
                out,
                meta.positions,
                num_splits,
                window or 0,
                scale * _LOG2_E,
                NUM_HEADS=shape.num_heads,
                GROUP=shape.group,
                ROWS=padded(shape.group),
                HEAD_DIM=shape.head_dim,
                WIDTH=padded(shape.head_dim),
                CHUNK=CHUNK_KEYS,
                num_warps=4,
                **ROUND_EACH,
            )
    return out


def _num_splits(shape: _Shape, meta: AttentionMeta, num_tiles: int, num_processors: int) -> int:
    """1 where the tiles fill the device by themselves or the partial states would not fit, else all chunks apart."""
    num_chunks = -(-meta.max_context_len // CHUNK_KEYS)
    partial_bytes = meta.num_tokens * shape.num_heads * num_chunks * (shape.head_dim + 2) * 4
    is_full = num_tiles * shape.num_kv_heads >= 2 * num_processors
    return 1 if is_full or num_chunks < 2 or partial_bytes > _PARTIAL_BYTES_MAX else num_chunks
