"""Runs one step on the device: numbers of the batch to tensors, forward pass, sampling. Also loads all that it needs.

Owns the model, the sampler and the KV cache's contents on the engine thread; must not know sequences, scheduling or the
network. Loading reads memory-mapped files and takes seconds; every unusable folder is one ModelError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import sub
from pathlib import Path

import numpy as np
import torch

from engine.batch import StepBatch, StepResults
from engine.block_tables import BlockTables
from engine.kv_cache import KVCache
from engine.model_spec import ModelError, ModelSpec
from engine.models.llama import LlamaModel
from engine.models.llama_weights import TensorSource, load_llama_weights
from engine.sampler import Sampler, rate_prompt
from engine.sequence import num_blocks_for
from engine.weights.model_files import load_model_spec, weights_fingerprint
from engine.weights.packed_cache import load_packed
from engine.weights.safetensors_files import Progress, SafetensorsFolder
from kernels.dispatch import select_ops
from kernels.ops import AttentionMeta, Ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchModelRunner:
    """Implements engine.batch.ModelRunner. Used by one thread only."""

    def __init__(self, model: LlamaModel, kv_cache: KVCache, sampler: Sampler) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._tables = BlockTables()

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResults:
        """Writes the KV of all T tokens; one token id per sample row. An empty batch is an assertion: a scheduler bug."""
        if batch.prompt_rows:
            return self._run_rated(batch)
        logits = self.compute_logits(batch)
        token_ids = self._sampler.sample(logits, batch.sample_rows)
        return StepResults(token_ids, self._sampler.rate(logits, batch.sample_rows, token_ids))

    @torch.inference_mode()
    def compute_logits(self, batch: StepBatch) -> torch.Tensor:
        """The forward pass alone: logits [R, V], row r for `batch.sample_rows[r]`."""
        return self._forward(batch, _last_rows(batch))

    def _run_rated(self, batch: StepBatch) -> StepResults:
        """The same with logits of prompt rows beside those that are sampled from: each row is projected once, in rising order."""
        last_rows = _last_rows(batch)
        ranges = [range(rows.first_row, rows.first_row + len(rows.token_ids)) for rows in batch.prompt_rows]
        wanted = sorted({*last_rows, *(row for rows in ranges for row in rows)})
        place = {row: index for index, row in enumerate(wanted)}
        all_logits = self._forward(batch, wanted)
        rated = [
            rate_prompt(all_logits[place[rows[0]] : place[rows[0]] + len(rows)], entry.token_ids, entry.num_logprobs)
            for rows, entry in zip(ranges, batch.prompt_rows, strict=True)
        ]
        logits = all_logits[[place[row] for row in last_rows]]
        token_ids = self._sampler.sample(logits, batch.sample_rows)
        return StepResults(token_ids, self._sampler.rate(logits, batch.sample_rows, token_ids), rated)

    def _forward(self, batch: StepBatch, rows: list[int]) -> torch.Tensor:
        assert batch.num_tokens, "a step without tokens"
        device = self._model.device
        token_ids = torch.frombuffer(batch.token_ids, dtype=torch.int64).to(device)
        self._tables.apply(batch.table_updates)
        return self._model.forward(
            token_ids,
            attention_meta(batch, self._tables, self._kv_cache.block_size, device),
            self._kv_cache.tensor,
            torch.tensor(rows, dtype=torch.int64, device=device),
        )


def _last_rows(batch: StepBatch) -> list[int]:
    return [batch.query_starts[row.sequence_index + 1] - 1 for row in batch.sample_rows]


def attention_meta(batch: StepBatch, tables: BlockTables, block_size: int, device: torch.device) -> AttentionMeta:
    """The batch's placement as tensors on the device; on a CPU all but the block tables are views of the batch's own arrays."""
    starts, max_context_len = batch.query_starts, max(batch.context_lens)
    rows = np.frombuffer(batch.table_rows, dtype=np.int32)
    return AttentionMeta(
        positions=torch.frombuffer(batch.positions, dtype=torch.int64).to(device),
        slot_mapping=torch.frombuffer(batch.slot_mapping, dtype=torch.int64).to(device),
        query_starts=torch.frombuffer(starts, dtype=torch.int32).to(device),
        context_lens=torch.frombuffer(batch.context_lens, dtype=torch.int32).to(device),
        block_tables=torch.from_numpy(tables.select(rows, num_blocks_for(max_context_len, block_size))).to(device),
        max_query_len=max(map(sub, starts[1:], starts)),
        max_context_len=max_context_len,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """All that a worker needs of its model. `fingerprint_of_weights` is equal in all processes that serve the same model;
    `weights` says where the weights lie, and why they are not shared with other workers where they are not."""

    spec: ModelSpec
    runner: TorchModelRunner
    kv_cache: KVCache
    fingerprint_of_weights: str
    weights: str


def load_engine_model(
    folder: str | Path,
    *,
    dtype: str,
    device: str | torch.device,
    block_size: int,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    ops: Ops | None = None,
    progress: Progress | None = None,
    packed_dir: Path | None = None,
) -> LoadedModel:
    """Loads weights as `dtype` ("float32", "bfloat16") and allocates the pool of `num_blocks`, else of `kv_bytes` in all.

    `packed_dir`: folder of packed weights that workers of this host share; None packs in this process' own memory.
    Raises ModelError for a folder that cannot be served and ValueError for a pool that holds no block.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    folder, device, torch_dtype = Path(folder), torch.device(device), DTYPES[dtype]
    spec = load_model_spec(folder)
    num_blocks = _pool_size(spec, torch_dtype, block_size, num_blocks, kv_bytes)
    ops = ops if ops is not None else select_ops(device, torch_dtype)
    num_positions = min(spec.max_positions, num_blocks * block_size)
    fingerprint = weights_fingerprint(folder, spec)

    @contextmanager
    def open_source() -> Iterator[TensorSource]:
        """Mapped apart from the tensors that stay: what was only read to be packed is unmapped afterwards."""
        with SafetensorsFolder(folder, spec, torch_dtype, device, progress) as source:
            yield source.take

    with torch.inference_mode(), SafetensorsFolder(folder, spec, torch_dtype, device, None) as files:
        packed = load_packed(folder, spec, fingerprint, torch_dtype, device, ops, open_source, packed_dir, progress)
        weights = load_llama_weights(spec, files.take, packed.linears)
        if progress is not None:
            progress(files.total_bytes, files.total_bytes)
    model = LlamaModel(spec, weights, ops, num_positions)
    kv_cache = KVCache(num_blocks, spec.num_layers, spec.num_kv_heads, block_size, spec.head_dim, torch_dtype, device, ops)
    return LoadedModel(spec, TorchModelRunner(model, kv_cache, Sampler(ops)), kv_cache, fingerprint, packed.where)


def _pool_size(spec: ModelSpec, dtype: torch.dtype, block_size: int, num_blocks: int | None, kv_bytes: int | None) -> int:
    if num_blocks is not None:
        return num_blocks
    if kv_bytes is None:
        raise ValueError("the KV pool needs num_blocks or kv_bytes")
    block_bytes = 2 * spec.num_layers * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize
    if kv_bytes < block_bytes:
        raise ValueError(f"kv_bytes {kv_bytes} hold no block: one block of {block_size} tokens needs {block_bytes} bytes")
    return kv_bytes // block_bytes
