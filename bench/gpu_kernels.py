"""The Triton kernels on a real GPU: correct first, then how near they come to what the memory and the vendor's library do.

Owns the cases and their yardsticks: attention and block copies as a share of a device-to-device copy's bytes per second, the
batch-invariant matrix product as a multiple of cuBLAS's time. Prints a table and writes JSON; exits 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.digest import payload_digest
from kernels.ops import AttentionMeta

Result = dict[str, Any]
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16  # one layer of an 8B model of the Llama family


def batch(device: torch.device, query_lens: list[int], contexts: list[int], num_blocks: int) -> AttentionMeta:
    """A ragged batch whose blocks lie at random places of a cache of `num_blocks`."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    width = max(-(-context // BLOCK_SIZE) for context in contexts)
    tables, positions, slots, starts = [], [], [], [0]
    for query_len, context in zip(query_lens, contexts, strict=True):
        table = [order.pop() for _ in range(-(-context // BLOCK_SIZE))]
        tables.append(table + [0] * (width - len(table)))
        positions += range(context - query_len, context)
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(context - query_len, context)]
        starts.append(len(positions))
    return AttentionMeta(
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        max_query_len=max(query_lens),
        max_context_len=max(contexts),
    )


def exact_attention(q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta, scale: float) -> torch.Tensor:
    """Attention over layer 0 in fp64, one sequence after the other, straight from the definition."""
    out = torch.empty_like(q, dtype=torch.float64)
    starts, group = meta.query_starts.tolist(), q.shape[1] // cache.shape[3]
    for s, context in enumerate(meta.context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        blocks = meta.block_tables[s, : -(-context // BLOCK_SIZE)].long()
        keys, values = cache[blocks, 0].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].repeat_interleave(group, 1)
        scores = torch.einsum("thd,hkd->htk", q[rows].double(), keys) * scale
        hidden = torch.arange(context, device=q.device)[None, :] > meta.positions[rows][:, None]
        out[rows] = torch.einsum("htk,hkd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
    return out


def check(device: torch.device, contexts: list[int]) -> list[Result]:
    """Every kernel against fp64 (or the digest's definition), and rows against the same rows in other company, bit for bit."""
    from kernels.triton_ops import TritonOps

    results: list[Result] = []

    def judge(name: str, actual: torch.Tensor, exact: torch.Tensor) -> None:
        error = float((actual.double() - exact).abs().max() / exact.abs().max())
        limit = 1e-5 if actual.dtype == torch.float32 else 2 * torch.finfo(actual.dtype).eps
        results.append({"check": name, "dtype": str(actual.dtype), "error": error, "limit": limit, "ok": error <= limit})

    def judge_bits(name: str, same: bool) -> None:
        results.append({"check": name, "ok": same})

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ops = TritonOps(device, dtype, is_batch_invariant=True)
        generator = torch.Generator().manual_seed(0)

        def rand(*size: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        num_blocks = sum(-(-context // BLOCK_SIZE) for context in contexts) + 1
        cache, query_lens = rand(num_blocks, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), [1, 33, *[1] * (len(contexts) - 2)]
        meta = batch(device, query_lens, contexts, num_blocks)
        q, scale = rand(meta.num_tokens, HEADS, HEAD_DIM), HEAD_DIM**-0.5
        out = ops.attention(q, cache, 0, meta, scale, None)
        judge("attention", out, exact_attention(q, cache, meta, scale))
        blocks = meta.block_tables[1:2].contiguous()
        alone = AttentionMeta(
            positions=meta.positions[33:34].clone(),
            slot_mapping=meta.slot_mapping[33:34].clone(),
            query_starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
            context_lens=meta.context_lens[1:2].clone(),
            block_tables=blocks,
            max_query_len=1,
            max_context_len=contexts[1],
        )
        judge_bits(
            f"a prefill row as a decode step, {dtype}",
            torch.equal(ops.attention(q[33:34].clone(), cache, 0, alone, scale, None), out[33:34]),
        )
        x, weight = rand(70, 512), rand(96, 512) / 23
        packed = ops.pack_linear(weight, None)
        product, exact = ops.linear(x, packed), x.double() @ weight.double().T
        judge("invariant linear", product, exact)
        judge("logits", ops.logits(x, packed), exact)
        judge_bits(
            f"rows of a product alone, {dtype}",
            all(torch.equal(ops.linear(x[r : r + 1], packed), product[r : r + 1]) for r in (0, 63, 69)),
        )
        wide, scales = x.double(), rand(512)
        judge(
            "rms norm",
            ops.rms_norm(x, scales, 1e-5),
            wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * scales.double(),
        )
        gate, up = wide.chunk(2, dim=1)
        judge("silu gate", ops.silu_mul(x), gate * gate.sigmoid() * up)
        slab = memoryview(bytearray(2 * cache[0].numel() * cache.element_size()))
        digest = ops.gather_blocks(cache, [2, 0], slab)
        gathered = bytes(cache[[2, 0]].contiguous().view(-1).view(torch.uint8).cpu().numpy())
        judge_bits(f"gather and its digest, {dtype}", bytes(slab) == gathered and digest == payload_digest(gathered))
        target = torch.zeros_like(cache)
        same = ops.scatter_blocks(slab, target, [1, 2]) == digest and torch.equal(target[[1, 2]], cache[[2, 0]])
        judge_bits(f"scatter and its digest, {dtype}", same)
    return results


def measure(device: torch.device) -> list[Result]:
    """Times of the kernels (medians, with the L2 cache flushed in between) beside their yardsticks."""
    from kernels.triton_blocks import BlockCopies
    from kernels.triton_ops import TritonOps

    ops = TritonOps(device, torch.bfloat16, is_batch_invariant=True)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_rate = 2 * source.numel() / _median_s(lambda: target.copy_(source))
    results: list[Result] = [{"what": "device copy, 1 GiB", "bytes_per_s": copy_rate}]

    def report_rate(what: str, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / seconds
        results.append({"what": what, "seconds": seconds, "bytes_per_s": rate, "share_of_copy": rate / copy_rate})

    for num_sequences, context in ((1, 4096), (1, 32768), (16, 4096), (64, 1024), (64, 4096)):
        num_blocks = num_sequences * context // BLOCK_SIZE
        cache = torch.randn(num_blocks, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=device, dtype=torch.bfloat16)
        meta = batch(device, [1] * num_sequences, [context] * num_sequences, num_blocks)
        q = torch.randn(num_sequences, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        seconds = _median_s(lambda q=q, cache=cache, meta=meta: ops.attention(q, cache, 0, meta, HEAD_DIM**-0.5, None))
        report_rate(f"decode attention, {num_sequences} x {context} keys", cache.numel() * 2, seconds)

    copies = BlockCopies(device)
    blocks = torch.empty(1024, 32, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device).zero_()  # 2 GiB
    for count in (1, 32, 512):
        ids = torch.randperm(1024, generator=torch.Generator().manual_seed(2))[:count].tolist()
        staged = torch.empty(count * (2 << 20), dtype=torch.uint8, device=device)
        for is_gather in (True, False):
            seconds = _median_s(
                lambda staged=staged, ids=ids, gather=is_gather: copies.launch(blocks, ids, staged, is_gather=gather)
            )
            name = "gather" if is_gather else "scatter"
            report_rate(f"{name} of {count} x 2 MiB with digest", 2 * staged.numel(), seconds)

    for num_outputs, num_inputs in ((6144, 4096), (28672, 4096), (4096, 14336)):
        weight = torch.randn(num_outputs, num_inputs, device=device, dtype=torch.bfloat16)
        packed = ops.pack_linear(weight, None)
        for num_rows in (1, 16, 64, 256, 2048):
            x = torch.randn(num_rows, num_inputs, device=device, dtype=torch.bfloat16)
            ours = _median_s(lambda x=x, packed=packed: ops.linear(x, packed))
            vendor = _median_s(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))
            what = f"invariant linear {num_rows} x {num_inputs} -> {num_outputs}"
            results.append({"what": what, "seconds": ours, "cublas_seconds": vendor, "times_cublas": ours / vendor})
    return results


def _median_s(call: Callable[[], Any]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(call, return_mode="median")) / 1e3


def _print_table(checks: list[Result], measurements: list[Result]) -> None:
    for result in checks:
        detail = f"error {result['error']:.1e}, limit {result['limit']:.1e}, {result['dtype']}" if "error" in result else "bits"
        print(f"{'ok  ' if result['ok'] else 'FAIL'}  {result['check']:48} {detail}")
    for result in measurements:
        if "times_cublas" in result:
            print(f"{result['what']:48} {result['seconds'] * 1e6:10.1f} us  {result['times_cublas']:6.2f} x cuBLAS's time")
        else:
            share = f"{result['share_of_copy']:6.1%} of the copy" if "share_of_copy" in result else ""
            print(f"{result['what']:48} {result['bytes_per_s'] / 1e9:10.1f} GB/s  {share}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "CUDA finds no device"
        print(f"no GPU: {why}; nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    checks = check(device, [2000, 333, 1, 700])
    is_correct = all(result["ok"] for result in checks)
    measurements = measure(device) if is_correct else []  # the speed of a wrong kernel is nobody's business
    _print_table(checks, measurements)
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit,
            "gpu": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"about": about, "checks": checks, "measurements": measurements}, indent=1))
    return 0 if is_correct else 1


if __name__ == "__main__":
    sys.exit(main())
