"""The promise "same answer everywhere" at the level of the engine: real scheduler, real forward pass, native kernels.

A tiny random model computes one sequence alone and then in other company: larger batches, other neighbours, other chunk borders, a
prefix hit, other numbers of threads. Its logits of every sampled token and the KV of every position must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.types import SamplingParams, StopConditions
from engine.batch import StepBatch, StepResults
from engine.block_allocator import BlockAllocator
from engine.commands import Commit, Generate, Reserve, Reserved, Sampled, SequenceSpec
from engine.model_runner import LoadedModel, load_engine_model
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from kernels.native import NativeOps
from kernels.native_build import NativeUnavailable
from tests.fakes.engine_driver import key

BLOCK_SIZE, NUM_BLOCKS, VOCAB, NUM_NEW = 4, 160, 199, 9
PROMPT = tuple((7 * index + 3) % VOCAB for index in range(37))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.25)
            if "norm" in name:
                parameter.add_(1.0)
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=DTYPES)
def loaded(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    try:
        ops = NativeOps(DTYPES[request.param])
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return load_engine_model(folder, dtype=request.param, device="cpu", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, ops=ops)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the thread count that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Run:
    """One engine over the loaded model's cache that keeps the logits of each sampled token and the KV of each position."""

    def __init__(self, loaded: LoadedModel, *, chunk: int = 64, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)
        self.loaded = loaded
        allocator = BlockAllocator(NUM_BLOCKS)
        settings = SchedulerSettings(BLOCK_SIZE, 128, chunk, 24, 200, 24)
        self.scheduler = Scheduler(settings, allocator, PrefixIndex(allocator, BLOCK_SIZE, b"test"))
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.kv: dict[str, torch.Tensor] = {}
        self.batch_sizes: set[int] = set()
        loaded.kv_cache.tensor.fill_(float("nan"))  # whoever reads a slot that was not written shows it

    def add(self, name: str, token_ids: tuple[int, ...] = PROMPT, num_new: int = NUM_NEW) -> None:
        assert not self.scheduler.handle(Generate(spec_of(name, token_ids, num_new)), 0.0)

    def step(self) -> bool:
        batch = self.scheduler.schedule(0.0)
        if batch is None:
            return False
        self.batch_sizes.add(batch.num_sequences)
        with torch.inference_mode():
            logits = self.loaded.runner.compute_logits(batch)
        self._keep(batch, logits)
        sampled = logits.argmax(dim=-1).tolist()
        for event in self.scheduler.apply(batch, StepResults(sampled), 0.0):
            if isinstance(event, Sampled):
                self.tokens.setdefault(event.key.request_id[1:], []).extend(event.token_ids)
        return True

    def _keep(self, batch: StepBatch, logits: torch.Tensor) -> None:
        """After the step's forward pass and before its apply, when all sequences of the step still have their blocks."""
        sequences = self.scheduler._scheduled
        for row, sample in enumerate(batch.sample_rows):
            self.logits.setdefault(sequences[sample.sequence_index].key.request_id[1:], []).append(logits[row].clone())
        cache = self.loaded.kv_cache.tensor
        for sequence, context in zip(sequences, batch.context_lens, strict=True):
            pages = cache[sequence.block_ids].permute(1, 2, 3, 0, 4, 5)  # [L, 2, Hkv, blocks, block_size, D]
            self.kv[sequence.key.request_id[1:]] = pages.flatten(3, 4)[:, :, :, :context].clone()

    def finish(self) -> Run:
        while self.step():
            pass
        return self

    def assert_same(self, name: str, other: Run, other_name: str) -> None:
        assert self.tokens[name] == other.tokens[other_name]
        assert same_bits(self.kv[name], other.kv[other_name]), "the KV differs"
        mine, others = torch.stack(self.logits[name]), torch.stack(other.logits[other_name])
        assert same_bits(mine, others), f"logits differ by up to {(mine - others).abs().max()}"


def spec_of(name: str, token_ids: tuple[int, ...], num_new: int = NUM_NEW) -> SequenceSpec:
    return SequenceSpec(key(name), token_ids, len(token_ids), SamplingParams(temperature=0.0), StopConditions(num_new))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def neighbour(index: int) -> tuple[int, ...]:
    return tuple((11 * index + 5 * position) % VOCAB for position in range(1 + 3 * index))


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> Run:
    run = Run(loaded)
    run.add("a")
    run.finish()
    assert len(run.tokens["a"]) == len(run.logits["a"]) == NUM_NEW and run.batch_sizes == {1}
    assert run.kv["a"].shape[3] == len(PROMPT) + NUM_NEW - 1 and not run.kv["a"].isnan().any()
    return run


def test_the_check_itself_sees_one_other_bit(alone: Run, loaded: LoadedModel) -> None:
    run = Run(loaded)
    run.add("a", (*PROMPT[:-1], PROMPT[-1] + 1))
    run.finish()
    with pytest.raises(AssertionError):
        alone.assert_same("a", run, "a")


@pytest.mark.parametrize("num_neighbours", [1, 2, 3, 7, 15])
def test_batch_size_and_neighbours_do_not_matter(alone: Run, loaded: LoadedModel, num_neighbours: int) -> None:
    """The neighbours begin at different steps and end at different ones, before and behind it in the batch."""
    run = Run(loaded, chunk=30)
    for index in range(num_neighbours):
        run.add(f"n{index}", neighbour(index), 8 + index)
        if index == num_neighbours // 2:
            run.add("a")
        if index % 3 == 0:
            run.step()
    run.finish()
    assert max(run.batch_sizes) >= min(num_neighbours + 1, 12)
    alone.assert_same("a", run, "a")


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 17, 36])
def test_chunk_borders_do_not_matter(alone: Run, loaded: LoadedModel, chunk: int) -> None:
    run = Run(loaded, chunk=chunk)
    run.add("a")
    run.finish()
    alone.assert_same("a", run, "a")


@pytest.mark.parametrize("num_shared", [4, 17, 36, 37])
def test_a_prefix_hit_does_not_matter(alone: Run, loaded: LoadedModel, num_shared: int) -> None:
    run = Run(loaded)
    run.add("before", (*PROMPT[:num_shared], 1, 2, 3), 4)
    run.finish()
    run.add("a")
    run.finish()
    num_hit = run.scheduler.counts().num_prefix_hit_tokens
    assert num_hit == min(num_shared, len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    alone.assert_same("a", run, "a")


@pytest.mark.parametrize("num_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(alone: Run, loaded: LoadedModel, num_threads: int) -> None:
    run = Run(loaded, chunk=20, num_threads=num_threads)
    run.add("n", neighbour(9), 6)
    run.add("a")
    run.finish()
    alone.assert_same("a", run, "a")


def test_kv_that_was_handed_over_does_not_matter(alone: Run, loaded: LoadedModel) -> None:
    """As a decode worker: the prompt's KV arrives from elsewhere, the rest is computed beside others."""
    run = Run(loaded)
    run.add("n", neighbour(5), 12)
    run.step()
    (reserved,) = run.scheduler.handle(Reserve(spec_of("a", PROMPT)), 0.0)
    assert isinstance(reserved, Reserved)
    for position in range(len(PROMPT)):
        block_id = reserved.block_ids[position // BLOCK_SIZE]
        loaded.kv_cache.tensor[block_id, :, :, :, position % BLOCK_SIZE] = alone.kv["a"][:, :, :, position]
    run.scheduler.handle(Commit(key("a"), alone.tokens["a"][0]), 0.0)
    run.finish()
    assert run.tokens["a"] == alone.tokens["a"][1:]
    assert same_bits(run.kv["a"], alone.kv["a"])
    assert same_bits(torch.stack(run.logits["a"]), torch.stack(alone.logits["a"][1:]))


def test_preemption_and_recompute_do_not_matter(alone: Run, loaded: LoadedModel) -> None:
    """Decoded tokens are computed again as a prompt chunk: prefill and decode rows must agree."""
    run = Run(loaded)
    run.add("first", neighbour(3), 4)
    run.add("a")
    for _ in range(4):
        run.step()
    victim = run.scheduler._sequences[key("a")]
    run.scheduler._preempt(victim)
    run.finish()
    assert run.scheduler.num_preemptions == 1
    alone.assert_same("a", run, "a")
