"""lm-eval against the real fleets: token-id prompts in batches, echo and logprobs, must score the same aggregated and disaggregated.

Runs where `BATON_LM_EVAL` names the program (`make lm-eval` installs one in an environment of its own) and is skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Fleet, Store, demo_model

FOLDER = Path(__file__).parent
PROGRAM = os.environ.get("BATON_LM_EVAL", "")
TIMEOUT_S = 300

pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="BATON_LM_EVAL does not name lm-eval: run `make lm-eval`"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.stop()


def scores(tmp_path: Path, fleet: Fleet, model: Path, batch_size: int) -> tuple[dict[str, Any], list[Any]]:
    """(metrics of each task, every likelihood in order) of one run."""
    tasks = tmp_path / "tasks"
    tasks.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.yaml"):
        (tasks / file.name).write_text(file.read_text().replace("{FOLDER}", str(FOLDER)))
    output = tmp_path / f"out-{batch_size}"
    arguments = (
        f"model=smollm2-135m,base_url={fleet.url}/v1/completions,tokenizer={model},tokenized_requests=True,num_concurrent=2,"
        "max_retries=1,max_length=2048"
    )
    command = [
        PROGRAM,
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        "baton_choice,baton_text",
        "--include_path",
    ]
    command += [str(tasks), "--batch_size", str(batch_size), "--output_path", str(output), "--log_samples"]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "unused"
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = output.rglob("results_*.json")
    metrics = json.loads(results.read_text())["results"]
    likelihoods = []
    for file in sorted(output.rglob("samples_*.jsonl")):  # the task's name leads
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        likelihoods += [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
    return metrics, likelihoods


def test_scores_are_identical_on_both_ways_and_in_any_batch(tmp_path_factory: pytest.TempPathFactory, store: Store) -> None:
    model = demo_model()
    runs = {}
    for name, num_prefill in (("aggregated", 0), ("disaggregated", 1)):
        with Fleet(model, store.url, prefill=num_prefill) as fleet:
            for batch_size in (1, 8):
                runs[name, batch_size] = scores(tmp_path_factory.mktemp(name), fleet, model, batch_size)
            fleet.wait_idle()
            assert set(fleet.stop().values()) == {0}
    metrics, likelihoods = runs["aggregated", 1]
    assert metrics["baton_choice"]["acc,none"] > 0.7, "a small model knows most of these: prompts were scored at chance"
    assert len(likelihoods) == 20
    for run, (other_metrics, other_likelihoods) in runs.items():
        assert other_likelihoods == likelihoods, run
        for task in metrics:
            for name, value in metrics[task].items():
                if name.endswith(",none") and isinstance(value, float):
                    assert other_metrics[task][name] == pytest.approx(value, abs=1e-12), (run, task, name)
