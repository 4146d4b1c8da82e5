"""What a load test sends: classes of requests, who sends which, and the prompts. Pure; knows no locust and no socket.

A workload is a set of classes with weights; each simulated user belongs to one class for its whole life. Every prompt is a pure function of
(seed, class, worker, user, number), so two runs send the same texts and no two requests of one run share a prefix by accident. Lengths
are tokens; they become words by a ratio that is measured on the server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench_prompts import make_prompt


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one kind, reported apart under `name`. `weight` is its share of the users, relative to the others'."""

    name: str
    prompt_tokens: int
    output_tokens: int
    weight: int


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Which request of a run: the number of the locust worker process, of the user in it, and of the request of that user."""

    worker: int
    user: int
    number: int


def select_classes(workload: str, chat: RequestClass, long: RequestClass) -> tuple[RequestClass, ...]:
    """The classes of `chat`, `long` or `mixed`. Raises ValueError for another name, lengths below 1 and weights that leave nobody."""
    known = {"chat": (chat,), "long": (long,), "mixed": (chat, long)}
    if workload not in known:
        raise ValueError(f"workload {workload!r}: {', '.join(known)} are known")
    classes = known[workload] if workload != "mixed" else tuple(one for one in known["mixed"] if one.weight)
    if not classes or any(one.weight < 0 for one in classes):
        raise ValueError(f"weights {chat.weight} and {long.weight}: none may be negative, and one must be positive")
    for one in classes:
        if one.prompt_tokens < 1 or one.output_tokens < 1:
            raise ValueError(
                f"class {one.name!r}: {one.prompt_tokens} prompt and {one.output_tokens} output tokens; 1 is the least"
            )
    return classes


def class_of_user(user: int, classes: Sequence[RequestClass]) -> RequestClass:
    """The class of the `user`-th user (from 0): shares as even as they can be at every number of users (smooth weighted turns)."""
    if len(classes) == 1:
        return classes[0]
    total = sum(one.weight for one in classes)
    credits = [0] * len(classes)
    chosen = 0
    for _ in range(user % total + 1):
        credits = [credit + one.weight for credit, one in zip(credits, classes, strict=True)]
        chosen = credits.index(max(credits))
        credits[chosen] -= total
    return classes[chosen]


def make_text(seed: int, name: str, key: PromptKey, num_words: int, num_prefix_words: int = 0) -> str:
    """One prompt of `num_words` words, of which the first `num_prefix_words` are the same in all requests of the seed.

    Behind the shared part stands a number of this request alone, so nothing else can come from a prefix cache.
    """
    own_words = max(1, num_words - num_prefix_words)
    generator = random.Random(f"{seed} {name} {key.worker} {key.user} {key.number}")
    own = f"{generator.randrange(10**9)} {key.worker} {key.user} {key.number} {make_prompt(generator, own_words)}"
    if not num_prefix_words:
        return own
    return f"{make_prompt(random.Random(f'{seed} shared prefix'), num_prefix_words)} {own}"
