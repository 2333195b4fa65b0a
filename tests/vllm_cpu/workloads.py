"""What is asked of the engine: prompts that share prefixes in the ways that serving traffic does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cpu_engine import Prompt

FIRST_TOKEN, LAST_TOKEN = 2, 511


@dataclass(slots=True)
class Workload:
    """Prompts in order of arrival.

    Attributes:
        name: For the table.
        prompts: Token ids.
        max_tokens: Tokens to answer, per prompt.
        arrivals: Engine step before which each prompt arrives, ascending.
    """

    name: str
    prompts: list[Prompt] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)

    def called(self, more: str) -> Workload:
        """This workload, with more to its name."""
        self.name += f", {more}"
        return self

    def add(self, prompt: Prompt, max_tokens: int = 4, arrival: int = 0) -> None:
        self.prompts.append(prompt)
        self.max_tokens.append(max_tokens)
        self.arrivals.append(arrival)


class Text:
    """Random token ids from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def tokens(self, least: int, most: int | None = None) -> Prompt:
        length = self._random.randint(least, most or least)
        return [self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]

    def choice(self, options: list[Prompt]) -> Prompt:
        return self._random.choice(options)


SUFFIXES = {"1": (1, 1), "20-60": (20, 60), "20-300": (20, 300)}


def few_shot(suffix: str, prefix: int = 672, requests: int = 8, seed: int = 1) -> Workload:
    """A burst over one few-shot prefix: the first to be scheduled writes it, the others read it then."""
    text = Text(seed)
    workload = Workload(f"few-shot, suffix {suffix}, writer first")
    shared = text.tokens(prefix)
    for _ in range(requests):
        workload.add(shared + text.tokens(*SUFFIXES[suffix]))
    return workload


def few_shot_writer_last(suffix: str, prefix: int = 672, requests: int = 6) -> Workload:
    """The writer sits in the last slot of the batch.

    Short requests before it finish, and readers take their slots while the writer is at its second chunk.
    """
    text = Text(2)
    workload = Workload(f"few-shot, suffix {suffix}, writer last")
    shared = text.tokens(prefix)
    for _ in range(requests):
        workload.add(text.tokens(8), max_tokens=1)
    workload.add(shared + text.tokens(40))
    for _ in range(requests):
        workload.add(shared + text.tokens(*SUFFIXES[suffix]), arrival=1)
    return workload


def grpo(groups: int = 16, size: int = 8) -> Workload:
    """Rollouts: groups of identical prompts."""
    text = Text(3)
    workload = Workload(f"GRPO, {groups} prompts x {size}")
    for _ in range(groups):
        prompt = text.tokens(100, 240)
        for _ in range(size):
            workload.add(list(prompt), max_tokens=3)
    return workload


def rag(documents: int = 5, requests: int = 24) -> Workload:
    """Questions over shared documents, a few at a time."""
    text = Text(4)
    workload = Workload("RAG, shared documents")
    library = [text.tokens(256, 420) for _ in range(documents)]
    system = text.tokens(64)
    for place in range(requests):
        workload.add(system + text.choice(library) + text.tokens(10, 60), max_tokens=3, arrival=place // 6)
    return workload


def multi_turn(users: int = 6, turns: int = 3) -> Workload:
    """Conversations over one system prompt; every turn is asked twice, as by a client that retries."""
    text = Text(5)
    workload = Workload("multi-turn")
    system = text.tokens(200)
    history = [system + text.tokens(20, 80) for _ in range(users)]
    for turn in range(turns):
        for user in range(users):
            workload.add(list(history[user]), max_tokens=3, arrival=4 * turn)
            workload.add(history[user] + text.tokens(1, 40), max_tokens=3, arrival=4 * turn)
            history[user] += text.tokens(30, 90)
    return workload


def chunked_prefill(groups: int = 6) -> Workload:
    """Groups of three over a prefix each, in a token budget that cuts prompts off anywhere."""
    text = Text(6)
    workload = Workload("chunked prefill")
    for group in range(groups):
        shared = text.tokens(150, 330)
        for _ in range(3):
            workload.add(shared + text.tokens(1, 90), arrival=group // 2)
    return workload


def preemption(requests: int = 14, max_tokens: int = 130) -> Workload:
    """More answers than the blocks hold: requests are preempted, and come back to shared prefixes."""
    text = Text(7)
    workload = Workload("preemption")
    prefixes = [text.tokens(96) for _ in range(3)]
    for place in range(requests):
        workload.add(prefixes[place % 3] + text.tokens(5, 60), max_tokens=max_tokens, arrival=place // 5)
    return workload


def repetitive(requests: int = 8) -> Workload:
    """Prompts that repeat themselves, so that n-gram drafts are proposed."""
    text = Text(8)
    workload = Workload("repetitive")
    shared = text.tokens(320)
    for place in range(requests):
        phrase = text.tokens(6)
        workload.add(shared + phrase * 8, max_tokens=12, arrival=place // 4)
    return workload
