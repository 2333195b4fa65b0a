"""Small wrong changes to the core, one at a time, each of which the Rust tests must catch.

The crate is copied to a temporary directory; the sources here stay as they are. All tests run but the large
exhaustive scopes (``large_*``), so what is caught here is caught without them.

Usage: python scripts/mutants.py [WORD...]   only the changes whose file or description holds one of the words
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = ["cargo", "test", "--quiet", "--profile", "checked", "--lib", "--test", "suite"]
OPTIONS = ["--no-fail-fast", "--", "--skip", "large_"]
# A change can make a loop endless; the first build takes long on a small machine.
TEST_SECONDS = 150
FIRST_SECONDS = 1800
MEMORY = 4 << 30
"""Bytes of address space of each process: a change can make a loop that grows."""


@dataclass(frozen=True)
class Mutant:
    """A change of ``old``, which stands once in the file, to ``new``."""

    file: str
    what: str
    old: str
    new: str


MUTANTS = [
    # Direction and cuts.
    Mutant("hazard.rs", "sweep from the front", ".skip(first).rev()", ".skip(first)"),
    Mutant(
        "hazard.rs", "first unsafe cut one too early", "cuts.first.max(offset + 1)", "cuts.first.max(offset)"
    ),
    Mutant(
        "hazard.rs",
        "first unsafe cut one too late",
        "cuts.first.max(offset + 1)",
        "cuts.first.max(offset + 2)",
    ),
    Mutant(
        "hazard.rs",
        "last unsafe cut one too early",
        "cuts.last.min(hazard.last_write)",
        "cuts.last.min(hazard.last_write - 1)",
    ),
    Mutant(
        "hazard.rs",
        "last unsafe cut one too late",
        "cuts.last.min(hazard.last_write)",
        "cuts.last.min(hazard.last_write + 1)",
    ),
    Mutant(
        "hazard.rs",
        "the cut in front of the reader asked about",
        "cuts.meet(request.offset + 1, last_write)",
        "cuts.meet(request.offset, last_write)",
    ),
    Mutant(
        "hazard.rs",
        "last cut asked about left out",
        "self.first.max(first) <= self.last.min(last)",
        "self.first.max(first) < self.last.min(last)",
    ),
    Mutant(
        "hazard.rs",
        "a write in the column of the first cut asked about left out",
        "group.column(request.computed + (from - request.offset))",
        "group.column(request.computed + (from - request.offset)) + 1",
    ),
    Mutant(
        "hazard.rs",
        "a write at the first cut asked about left out",
        "request.offset + request.scheduled <= from {",
        "request.offset + request.scheduled <= from + 1 {",
    ),
    Mutant("hazard.rs", "a merged range loses its end", "range.last = range.last.max(next.last);", ""),
    Mutant(
        "hazard.rs", "touching ranges stay apart", "next.first <= range.last + 1", "next.first <= range.last"
    ),
    # Blocks and slots.
    Mutant(
        "hazard.rs",
        "shared block counts without a shared slot",
        "if read.start.max(written.start) >= end {",
        "if read.start.max(written.start) > end {",
    ),
    Mutant(
        "hazard.rs",
        "last write in the block, not among the slots read",
        "let end = read.end.min(written.end);",
        "let end = written.end;",
    ),
    Mutant(
        "hazard.rs",
        "offset of the last write off by one",
        "tokens_per_column + end - 1",
        "tokens_per_column + end",
    ),
    Mutant(
        "hazard.rs",
        "the block taken to stand in the writer's first column",
        "slots(group, write.column, &requests[write.request as usize].writes())",
        "slots(group, 0, &requests[write.request as usize].writes())",
    ),
    Mutant(
        "hazard.rs",
        "earliest instead of furthest write",
        ".max_by_key(|&(last, _)| last)",
        ".min_by_key(|&(last, _)| last)",
    ),
    Mutant(
        "hazard.rs",
        "first hit instead of the furthest",
        "furthest.is_none_or(|known| known.last_write < last_write)",
        "furthest.is_none()",
    ),
    Mutant(
        "hazard.rs",
        "only the latest writer of a block",
        "if write.previous == 0 { 0 } else { *latest }",
        "0_u32",
    ),
    Mutant(
        "hazard.rs",
        "writers of the last step linked in",
        "if write.previous == 0 { 0 } else { *latest }",
        "*latest",
    ),
    Mutant(
        "hazard.rs",
        "what a request writes itself makes it depend on itself",
        "if writer != position && last_shared_slot",
        "if last_shared_slot",
    ),
    Mutant(
        "hazard.rs",
        "last group skipped for writes",
        "insert_writes(tables, index, group, written, position, request, cuts.first)?;",
        "if index == 0 { insert_writes(tables, index, group, written, position, request, cuts.first)?; }",
    ),
    Mutant(
        "hazard.rs",
        "a reader of a part of a block is shown its writes once",
        "} else if is_whole(group, slots) {",
        "} else {",
    ),
    Mutant(
        "hazard.rs",
        "the writes are shown to one reader only",
        "if latest.shown_to == reader {",
        "if latest.shown_to != 0 {",
    ),
    Mutant(
        "hazard.rs",
        "the writes are shown to a reader for each column",
        "latest.shown_to = reader;",
        "let _ = reader;",
    ),
    Mutant(
        "hazard.rs",
        "a write to a part of a block hides the one before",
        "before.request == write.request && is_whole(group, &slots_of(group, requests, write))",
        "before.request == write.request",
    ),
    Mutant(
        "hazard.rs",
        "a write to a whole block hides those of others",
        "before.request == write.request && is_whole(group, &slots_of(group, requests, write))",
        "is_whole(group, &slots_of(group, requests, write))",
    ),
    Mutant(
        "hazard.rs",
        "all writes of a request to a block are kept",
        "again.map_or(previous, |before| before.previous)",
        "previous",
    ),
    Mutant(
        "bitset.rs",
        "sets not emptied",
        "self.words[block as usize / WORD] &= !(1 << (block as usize % WORD));",
        "let _ = block;",
    ),
    Mutant(
        "bitset.rs",
        "what is in the set counts as new",
        "let is_new = *word & bit == 0;",
        "let is_new = bit != 0;",
    ),
    Mutant("bitset.rs", "highest member missed in long rows", "set.high - set.low + 1", "set.high - set.low"),
    Mutant("bitset.rs", "end of a long row misplaced", "Some(ids.len() - rest.len() + place)", "Some(place)"),
    # What a request reads and writes.
    Mutant(
        "step.rs",
        "window one too long",
        "(computed + 1).saturating_sub(window)",
        "computed.saturating_sub(window)",
    ),
    Mutant(
        "step.rs",
        "window one too short",
        "(computed + 1).saturating_sub(window)",
        "(computed + 2).saturating_sub(window)",
    ),
    Mutant(
        "step.rs", "chunk ignored", "computed - computed % chunk", "computed - computed % chunk.max(1 << 30)"
    ),
    Mutant(
        "step.rs",
        "settled tokens ignored",
        "first.max(self.settled)..self.read",
        "first..self.read",
    ),
    Mutant(
        "step.rs",
        "settled in part taken for settled",
        "self.settled > 0 && self.settled >= self.read",
        "self.settled > 0",
    ),
    Mutant(
        "step.rs",
        "last column one too far",
        "group.column(positions.end - 1) + 1",
        "group.column(positions.end) + 1",
    ),
    Mutant(
        "step.rs",
        "last column left out",
        "group.column(positions.end - 1) + 1",
        "group.column(positions.end - 1).max(1)",
    ),
    # Mirror.
    Mutant("mirror.rs", "shared by three or more", "(entries > 1).then_some", "(entries > 2).then_some"),
    Mutant(
        "mirror.rs",
        "shared by three or more, in the first look",
        "is_some_and(|&(entries, _)| entries > 1)",
        "is_some_and(|&(entries, _)| entries > 2)",
    ),
    Mutant(
        "mirror.rs",
        "first look begins one token late",
        "request.offset + request.scheduled <= from)",
        "request.offset + request.scheduled <= from + 1)",
    ),
    Mutant(
        "mirror.rs",
        "a row that grew in time taken for older",
        "if history.grown < since {",
        "if history.grown <= since {",
    ),
    Mutant(
        "mirror.rs",
        "the growth before taken for older",
        "history.grown_before < since {",
        "history.grown_before <= since {",
    ),
    Mutant(
        "mirror.rs",
        "a block comes into use at each entry",
        "if *entries == 0 {",
        "if *entries < u32::MAX {",
    ),
    Mutant("mirror.rs", "a growth forgets the one before", "(len, history.grown);", "(len, 0);"),
    Mutant("mirror.rs", "old blocks keep their time when time begins again", "*since = 0;", ""),
    Mutant(
        "mirror.rs",
        "a slot may come twice",
        "Some(seen) if *seen < self.batch",
        "Some(seen) if *seen <= self.batch",
    ),
    Mutant(
        "step.rs",
        "reads end at the computed tokens",
        "first.max(self.settled)..self.read",
        "first.max(self.settled)..self.computed.min(self.read)",
    ),
    Mutant(
        "step.rs",
        "the prompt is out of view",
        "self.settled..self.prompt.min(first)",
        "self.settled..first.min(0)",
    ),
    Mutant(
        "step.rs",
        "all below the window taken for prompt",
        "self.settled..self.prompt.min(first)",
        "self.settled..first",
    ),
    Mutant(
        "step.rs",
        "settled tokens of the prompt are read",
        "self.settled..self.prompt.min(first)",
        "0..self.prompt.min(first).min(self.read)",
    ),
    Mutant(
        "step.rs",
        "tokens that are read ahead are written",
        "self.read..self.end()",
        "self.computed..self.end()",
    ),
    Mutant(
        "step.rs",
        "reads go beyond the tokens",
        "counts.read = read.min(counts.end());",
        "counts.read = read;",
    ),
    Mutant(
        "step.rs",
        "settled as far as computed taken for settled as far as read",
        "self.settled > 0 && self.settled >= self.read",
        "self.settled > 0 && self.settled >= self.computed.min(self.read)",
    ),
    Mutant(
        "step.rs",
        "a request without a row writes",
        "(counts.settled, counts.read) = (u32::MAX, u32::MAX);",
        "counts.settled = u32::MAX;",
    ),
    # Order.
    Mutant(
        "order.rs",
        "a request in its section does not wait",
        "} else if self.waits_for[here] == 0 {",
        "} else if self.waits_for[here] <= 1 {",
    ),
    Mutant(
        "order.rs",
        "phases of the writers ignored",
        "filter(|&writer| self.section_of[writer] == section)",
        "filter(|_| true)",
    ),
    Mutant("order.rs", "sections as they come", "self.sections.sort_unstable();", ""),
    Mutant(
        "order.rs",
        "the foremost writer moves, not the hindmost",
        "best = best.max(Some(self.place[writer]));",
        "best = Some(best.map_or(self.place[writer], |best: usize| best.min(self.place[writer])));",
    ),
    Mutant(
        "order.rs",
        "a search is marked by its reader",
        "self.visited[writer] == position",
        "self.visited[writer] <= position",
    ),
    Mutant("order.rs", "every late writer may wait", "                && self.waits_for[writer] == 0\n", ""),
    Mutant("order.rs", "nobody keeps the lead", "            self.keep_the_lead(short);\n", ""),
    Mutant("order.rs", "readers of long requests keep the lead", "&& !follows[request]", ""),
    Mutant(
        "order.rs",
        "needing a long request through another is overlooked",
        "!std::mem::replace",
        "std::mem::replace",
    ),
    Mutant(
        "order.rs",
        "writers of those who keep the lead stay behind",
        "spread(&self.by_reader, &mut leads);",
        "",
    ),
    Mutant(
        "order.rs",
        "every short request is pulled to the front",
        "request < first_long && self",
        "short[request] && self",
    ),
    Mutant(
        "order.rs",
        "the last section with a long request is cut",
        "map(|request| self.section_of[request]).min())",
        "map(|request| self.section_of[request]).max())",
    ),
    Mutant(
        "order.rs",
        "a section of its own for each phase",
        "self.section_of.push(2 * phase);",
        "self.section_of.push(phase);",
    ),
    Mutant(
        "order.rs",
        "the lead is overrated",
        "self.place[request] >= first_long)",
        "self.place[request] > first_long + 1)",
    ),
]


def run(crate: Path, target: Path, seconds: int = TEST_SECONDS) -> tuple[list[str], str]:
    """Run the tests; those that fail, and the output."""
    env = os.environ | {
        "CARGO_TARGET_DIR": str(target),
        "CARGO_TERM_COLOR": "never",
        # What fails is enough; the smallest case that does is not asked for.
        "PROPTEST_MAX_SHRINK_ITERS": "0",
        "RUST_BACKTRACE": "0",
    }
    # In a process group of its own, so that an endless test goes with the cargo that started it.
    tests = subprocess.Popen(
        TEST + OPTIONS,
        cwd=crate,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    try:
        output, _ = tests.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        return [f"no end within {seconds} s"], ""
    failed = sorted(set(re.findall(r"^    (\S+::\S+)$", output, re.MULTILINE)))
    if not failed and (killed := re.search(r"\(signal: (\d+), .*\)", output)):
        # A test that has no memory left takes the whole program with it.
        failed = [f"killed by signal {killed[1]}"]
    if tests.returncode and not failed:
        return [], output or "failed without a word"
    return failed, ""


def main(words: list[str]) -> int:
    """Try every change and print who caught it."""
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.file} {m.what}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        crate, target = Path(scratch, "crate"), Path(scratch, "target")
        crate.mkdir()
        for name in ["Cargo.toml", "Cargo.lock", "README.md", "LICENSE"]:
            shutil.copy(ROOT / name, crate)
        shutil.copytree(ROOT / "rust", crate / "rust")
        failed, trouble = run(crate, target, FIRST_SECONDS)
        if failed or trouble:
            print(f"the tests fail on the unchanged crate: {failed or trouble}", file=sys.stderr)
            return 2
        survivors = 0
        start = time.monotonic()
        width = max(len(m.what) for m in chosen)
        for mutant in chosen:
            path = crate / "rust" / mutant.file
            source = path.read_text()
            if source.count(mutant.old) != 1:
                print(f"{mutant.file} holds {source.count(mutant.old)} times: {mutant.old}", file=sys.stderr)
                return 2
            path.write_text(source.replace(mutant.old, mutant.new))
            failed, trouble = run(crate, target)
            path.write_text(source)
            if trouble:
                print(f"{mutant.file}: {mutant.what}: does not build\n{trouble}", file=sys.stderr)
                return 2
            survivors += not failed
            caught = ", ".join(failed) if failed else "SURVIVES"
            print(f"{mutant.file:<10} {mutant.what:<{width}}  {caught}", flush=True)
        seconds = time.monotonic() - start
        print(f"{len(chosen)} changes, {survivors} not caught, {seconds:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
