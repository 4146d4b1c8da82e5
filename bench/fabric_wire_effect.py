"""What a wire format does to answers: logits and greedy tokens after a prompt's KV went through it, against the exact KV.

Run as `python -m bench.fabric_wire_effect --model FOLDER`. The model runs in transformers (bf16); only the KV of the prompt passes the
wire, in blocks of 16 tokens, as in a handoff. Prompts are pieces of this repository's own documents. Both ways then read the exact way's
greedy tokens, so that each position compares one logits vector with one.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernels.wire import VALUE_MAX, select_wire_blocks

BLOCK = 16


def through_the_wire(past: Any, wire_format: str) -> Any:
    """A copy of the KV of one sequence whose values have been quantised and dequantised block by block."""
    past = copy.deepcopy(past)
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in past.layers])  # [L, 2, Hkv, T, D]
    num_tokens = kv.shape[3]
    padded = torch.nn.functional.pad(kv, (0, 0, 0, -num_tokens % BLOCK))
    num_layers, _, num_heads, padded_tokens, head_dim = padded.shape
    blocks = padded.view(num_layers, 2, num_heads, padded_tokens // BLOCK, BLOCK, head_dim).permute(3, 0, 1, 2, 4, 5).contiguous()
    wire = select_wire_blocks(blocks, wire_format)
    ids = range(blocks.shape[0])
    slab = memoryview(bytearray(wire.block_bytes * blocks.shape[0]))
    wire.gather(ids, slab)
    wire.scatter(slab, ids)
    back = blocks.permute(1, 2, 3, 0, 4, 5).reshape(num_layers, 2, num_heads, padded_tokens, head_dim)[:, :, :, :num_tokens]
    for index, layer in enumerate(past.layers):
        layer.keys, layer.values = back[index, 0][None].contiguous(), back[index, 1][None].contiguous()
    return past


@torch.inference_mode()
def compare(model: Any, prompt: torch.Tensor, num_tokens: int) -> dict[str, list[tuple[float, float, int]]]:
    """For each format and position: largest and mean absolute difference of logits, and whether the greedy token changed."""
    first = model(prompt, use_cache=True)
    past, tokens = copy.deepcopy(first.past_key_values), [int(first.logits[0, -1].argmax())]
    for _ in range(num_tokens - 1):
        step = model(torch.tensor([[tokens[-1]]]), past_key_values=past, use_cache=True)
        past = step.past_key_values
        tokens.append(int(step.logits[0, -1].argmax()))
    said = torch.tensor([tokens])
    exact = model(said, past_key_values=copy.deepcopy(first.past_key_values)).logits[0].float()
    found = {}
    for wire_format in VALUE_MAX:
        logits = model(said, past_key_values=through_the_wire(first.past_key_values, wire_format)).logits[0].float()
        difference = (logits - exact).abs()
        changed = logits.argmax(dim=1) != exact.argmax(dim=1)
        found[wire_format] = [(float(d.max()), float(d.mean()), int(c)) for d, c in zip(difference, changed, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=250)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    text = "\n".join(Path(name).read_text() for name in ("README.md", "docs/architecture.md"))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    stride = max(1, (len(ids) - arguments.prompt_tokens) // arguments.prompts)
    collected: dict[str, list[tuple[float, float, int]]] = {name: [] for name in VALUE_MAX}
    for number in range(arguments.prompts):
        prompt = ids[number * stride : number * stride + arguments.prompt_tokens][None]
        for name, rows in compare(model, prompt, arguments.tokens).items():
            collected[name] += rows
    for name, rows in collected.items():
        print(
            json.dumps(
                {
                    "format": name,
                    "positions": len(rows),
                    "logit_difference_max": round(max(row[0] for row in rows), 4),
                    "logit_difference_mean": round(sum(row[1] for row in rows) / len(rows), 5),
                    "greedy_tokens_changed": round(sum(row[2] for row in rows) / len(rows), 4),
                }
            )
        )


if __name__ == "__main__":
    main()
