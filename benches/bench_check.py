"""The check of a step: with the mirror, stateless, and as a ratio to vLLM's rule."""

from __future__ import annotations

from ubatch_guard import reference
from ubatch_guard.bench import Call, Subjects, in_turns
from ubatch_guard.cases import CASES, CONTEXTS, REQUESTS, by_name, cuts_of, of_context, of_requests

NAMES = (*(case.name for case in CASES), "long1024-shuffled", "rag512-shuffled")
CONTEXT_NAMES = tuple(of_context(tokens).name for tokens in CONTEXTS)
REQUEST_NAMES = tuple(of_requests(requests).name for requests in REQUESTS)
ROUNDS = 7

Safe = dict[str, bool]


class _Checked:
    """Subjects of a case whose answers are the reference's."""

    param_names = ("case",)
    version = "1"
    timeout = 300

    def setup_cache(self) -> Safe:
        """Ask the slow reference about every case once for all benchmarks here."""
        steps = {name: by_name(name).step() for name in (*NAMES, *CONTEXT_NAMES, *REQUEST_NAMES)}
        return {name: not reference.unsafe_cuts(step, cuts_of(step)) for name, step in steps.items()}

    def setup(self, safe: Safe, name: str) -> None:
        self.subjects = Subjects(by_name(name).step())
        self.subjects.check(safe[name])


class Check(_Checked):
    """Time of one question about a whole step."""

    params = NAMES

    def time_mirror(self, safe: Safe, name: str) -> None:
        self.subjects.mirrored()

    def time_stateless(self, safe: Safe, name: str) -> None:
        self.subjects.stateless()

    def time_stateless_unsettled(self, safe: Safe, name: str) -> None:
        self.subjects.unsettled()


class Ratio(_Checked):
    """How many times faster than vLLM's rule, timed in turns so that the machine's mood cancels out."""

    params = NAMES
    unit = "times as fast"

    def track_mirror(self, safe: Safe, name: str) -> float:
        return _ratio(self.subjects.numpy_rule, self.subjects.mirrored)

    def track_stateless(self, safe: Safe, name: str) -> float:
        return _ratio(self.subjects.numpy_rule, self.subjects.stateless)


class Floor(_Checked):
    """The stateless check against one read of the readers' rows."""

    params = ("long1024", "long1024-shuffled", "rag512", "rag512-shuffled")
    unit = "times one read"

    def track_stateless(self, safe: Safe, name: str) -> float:
        return _ratio(self.subjects.stateless, self.subjects.floor(by_name(name)))


class Context(_Checked):
    """The mirror's time against that at 1k tokens of context, at equal work."""

    params = CONTEXT_NAMES
    unit = "times 1k tokens"

    def track_mirror(self, safe: Safe, name: str) -> float:
        return _ratio(self.subjects.mirrored, Subjects(by_name(self.params[0]).step()).mirrored)


class Requests(_Checked):
    """The mirror's time against that of 8 requests."""

    params = REQUEST_NAMES
    unit = "times 8 requests"

    def track_mirror(self, safe: Safe, name: str) -> float:
        return _ratio(self.subjects.mirrored, Subjects(by_name(self.params[0]).step()).mirrored)


def _ratio(above: Call, below: Call) -> float:
    us = in_turns({"above": above, "below": below}, ROUNDS)
    return us["above"] / us["below"]
