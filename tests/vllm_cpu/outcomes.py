"""The page of outcomes: requests answered wrongly and steps split, under vLLM alone and under the guard.

``python outcomes.py FOLDER docs/vllm-outcomes.md`` joins what the test processes have left in FOLDER.
Sections of releases that none of them ran stay as they are, and so do those of others (`write_section`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

FOLDER_VARIABLE = "UBATCH_OUTCOMES"

_PREAMBLE = """\
# Outcomes on the real vLLM engine

Made by `make test-vllm`: vLLM on a CPU, a tiny random model, steps really cut into microbatches. V2's run
by vLLM's own `UBatchRunner`, with its threads, after a vote by its own `dispatch_cg_and_sync_dp`; V1's run
one after the other. A request counts as wrong when its tokens, or the log-probabilities of the likeliest
five (to 1e-5), are not those of the whole run; where two tokens tie to within that, either will do. Each
pair is requests wrong / steps split. *Demoted*: requests, and tokens of their context, that `reorder` took
from among the decodes. The threshold is V1's `reorder_batch_threshold`; V2 has none, and no guard of its
own."""

_POISON = """\
### Poison

NaN in every slot until it is written (`UBATCH_GUARD_POISON=1`). *Wrong*: answers with every step cut,
without a guard and without poison. *Reported*: requests that read NaN, in the same cuts. *Silent*: requests
that read NaN under `reorder`, and with no step cut and no guard; 0 is right. Priority preemption is wrong
without any cut, and no guard's matter."""

_RELEASE = "vLLM "
"""Begins the heading of a release's section."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One workload, cut in one way.

    Attributes:
        release: Of vLLM.
        runner: V1 or V2.
        case: The workload, and how it was cut.
        threshold: ``reorder_batch_threshold``.
        requests: Requests in it.
        eligible: Steps that could be cut, in the whole run.
        unguarded_wrong: Requests answered wrongly with every step cut; and so on.
        vllm_wrong: Under vLLM's own guard; None where it has none.
        demoted_requests: Under ``reorder``; tokens likewise.
    """

    release: str
    runner: str
    case: str
    threshold: int | None
    requests: int
    eligible: int
    unguarded_wrong: int
    unguarded_split: int
    vllm_wrong: int | None
    vllm_split: int | None
    veto_wrong: int
    veto_split: int
    reorder_wrong: int
    reorder_split: int
    demoted_requests: int
    demoted_tokens: int


@dataclass(frozen=True, slots=True)
class PoisonOutcome:
    """One workload with NaN in every slot that nobody has written, every step cut.

    Attributes:
        release: Of vLLM.
        runner: V1 or V2.
        case: The workload.
        requests: Requests in it.
        wrong: Answered wrongly without a guard and without poison.
        reported: To have read NaN without a guard; ``both``: of these, those that were wrong.
        guarded_reported: The same under ``reorder``; None: not run.
        uncut_reported: The same with no step cut.
    """

    release: str
    runner: str
    case: str
    requests: int
    wrong: int
    reported: int
    both: int
    guarded_reported: int | None
    uncut_reported: int


class Recorder:
    """Keeps the outcomes of this process, and writes them where the environment says."""

    measured: ClassVar[list[Outcome]] = []
    poison: ClassVar[list[PoisonOutcome]] = []
    notes: ClassVar[list[tuple[str, str]]] = []

    def note(self, release: str, text: str) -> None:
        """Something else that was measured, as a sentence."""
        self.notes.append((release, text))

    def __call__(self, outcome: Outcome) -> None:
        self.measured.append(outcome)

    def poisoned(self, outcome: PoisonOutcome) -> None:
        """A case with poison."""
        self.poison.append(outcome)

    def save(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder and (self.measured or self.poison or self.notes):
            path = Path(folder) / f"{os.getpid()}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            said = {
                "outcomes": [asdict(outcome) for outcome in self.measured],
                "poison": [asdict(outcome) for outcome in self.poison],
                "notes": self.notes,
            }
            path.write_text(json.dumps(said))


def as_markdown(outcomes: Iterable[Outcome]) -> str:
    """The sums of each runner, then one line per outcome; empty without outcomes."""
    outcomes = sorted(
        outcomes, key=lambda o: (o.runner == "V1", o.case, o.threshold is not None, o.threshold or 0)
    )
    if not outcomes:
        return ""
    lines = [
        "| runner | case | threshold | requests | eligible steps | every step cut | vLLM alone | veto "
        "| reorder | demoted: requests / tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for runner in dict.fromkeys(o.runner for o in outcomes):
        of_runner = [o for o in outcomes if o.runner == runner]
        lines.append(_line(f"**{runner}**", "**all**", "", of_runner))
    lines += [_line(o.runner, o.case, "" if o.threshold is None else str(o.threshold), [o]) for o in outcomes]
    return "\n".join(lines)


def poison_as_markdown(outcomes: Iterable[PoisonOutcome]) -> str:
    """What the columns are, and one line per outcome; empty without outcomes."""
    outcomes = sorted(outcomes, key=lambda o: (o.runner == "V1", o.case))
    if not outcomes:
        return ""
    lines = [
        _POISON,
        "",
        "| runner | case | requests | wrong | reported | reported, not wrong | wrong, not reported "
        "| silent: `reorder` | silent: no step cut |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in outcomes:
        cells = [o.runner, o.case, o.requests, o.wrong, o.reported, o.reported - o.both, o.wrong - o.both]
        cells += ["" if o.guarded_reported is None else o.guarded_reported, o.uncut_reported]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _line(runner: str, case: str, threshold: str, outcomes: Sequence[Outcome]) -> str:
    def total(name: str) -> int | None:
        values = [getattr(outcome, name) for outcome in outcomes]
        return None if None in values else sum(values)

    cells = [runner, case, threshold, str(total("requests")), str(total("eligible"))]
    for way in ("unguarded", "vllm", "veto", "reorder"):
        wrong, split = total(f"{way}_wrong"), total(f"{way}_split")
        cells.append("" if wrong is None else f"{wrong} / {split}")
    cells.append(f"{total('demoted_requests')} / {total('demoted_tokens')}")
    return f"| {' | '.join(cells)} |"


def write_section(page: Path, heading: str, text: str) -> None:
    """Put a section into the page, in place of the one that had this heading."""
    _write(page, _sections(page) | {heading: text})


def _sections(page: Path) -> dict[str, str]:
    """Heading -> text of the sections of a page, if there is one."""
    parts = re.split(r"^## (.*)$", page.read_text() if page.exists() else "", flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def _write(page: Path, sections: dict[str, str]) -> None:
    """The newest release first, and after the releases what else there is."""

    def place(heading: str) -> tuple[bool, list[int], str]:
        return not heading.startswith(_RELEASE), [-int(n) for n in re.findall(r"\d+", heading)], heading

    parts = [_PREAMBLE, *(f"## {heading}\n\n{sections[heading]}" for heading in sorted(sections, key=place))]
    page.write_text("\n\n".join(parts) + "\n")


def main(folder: str, target: str) -> None:
    said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    outcomes = [Outcome(**outcome) for process in said for outcome in process["outcomes"]]
    poison = [PoisonOutcome(**outcome) for process in said for outcome in process.get("poison", ())]
    notes = [note for process in said for note in process["notes"]]
    assert outcomes, f"no outcomes in {folder}"
    page = Path(target)
    sections = _sections(page)
    for release in {outcome.release for outcome in outcomes}:
        table = as_markdown(outcome for outcome in outcomes if outcome.release == release)
        under_poison = poison_as_markdown(outcome for outcome in poison if outcome.release == release)
        parts = [*(text for of, text in notes if of == release), table, under_poison]
        sections[_RELEASE + release] = "\n\n".join(filter(None, parts))
        print(f"vLLM {release}\n{table}")
    _write(page, sections)


if __name__ == "__main__":
    main(*sys.argv[1:])
