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


class RandomTraffic:
    """Batches of requests over a tree of prefixes that grows and forks; one seed gives one stream.

    Args:
        seed: Of everything drawn.
        longest_answer: In tokens.
    """

    _MOST_PREFIXES = 12
    _LONGEST_PREFIX = 600

    def __init__(self, seed: int, longest_answer: int = 4) -> None:
        self._text = Text(seed)
        self._random = random.Random(~seed)
        self._longest_answer = longest_answer

    def workload(self, requests: int) -> Workload:
        """The next batch. Prefixes are fresh, those of others with more text, or forks of them."""
        workload = Workload("random traffic")
        draw = self._random
        prefixes: list[Prompt] = []
        arrival = 0
        while len(workload.prompts) < requests:
            # A burst arrives at once, mostly over one prefix.
            prefix = self._prefix(prefixes)
            for _ in range(min(draw.choice((1, 2, 4, 8)), requests - len(workload.prompts))):
                kind = draw.random()
                if kind < 0.1 and workload.prompts:
                    prompt = list(draw.choice(workload.prompts))
                else:
                    prompt = (draw.choice(prefixes) if kind < 0.3 else prefix) + self._suffix()
                workload.add(prompt, max_tokens=draw.randint(1, self._longest_answer), arrival=arrival)
            arrival += draw.choice((0, 0, 1, 1, 2, 4))
        return workload

    def _prefix(self, prefixes: list[Prompt]) -> Prompt:
        draw = self._random
        base: Prompt = []
        if prefixes and draw.random() < 0.6:
            base = draw.choice(prefixes)
            if draw.random() < 0.5:
                # A fork, in the middle of a block as a rule.
                base = base[: draw.randint(1, len(base))]
        prefix = (base + self._text.tokens(1, 320))[: self._LONGEST_PREFIX]
        if len(prefixes) == self._MOST_PREFIXES:
            prefixes.pop(draw.randrange(len(prefixes)))
        prefixes.append(prefix)
        return prefix

    def _suffix(self) -> Prompt:
        """Of 1 to 300 tokens, most of them short; some repeat themselves, for n-gram drafts."""
        draw = self._random
        longest = draw.choice((1, 8, 40, 40, 300))
        if draw.random() < 0.2:
            phrase = self._text.tokens(1, 6)
            return (phrase * 50)[: draw.randint(1, longest)]
        return self._text.tokens(1, longest)
