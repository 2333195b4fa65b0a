"""``ubatch-guard demo``: one workload whole, cut without a guard, and cut under each rule; one row each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig
    from .llm_engine import EngineStats
    from .model import DecoderModel
    from .parallel import Ranks
    from .sanitizer import UnwrittenRead
    from .workloads import Workload

WORKLOADS = ("fewshot", "grpo", "rag", "requests")
POLICIES = ("unguarded", "vllm", "veto", "reorder")
GUARDED = ("veto", "reorder")


@dataclasses.dataclass(slots=True)
class Row:
    """One run of the workload.

    Attributes:
        policy: ``whole``: no step is cut; or the rule by which steps are.
        requests: Requests served.
        wrong: Requests whose tokens differ from those of the whole run.
        steps: Steps run.
        eligible: Of those, large enough to be cut.
        split: Cut.
        vetoed: Eligible and not cut.
        reordered: Brought into another order by the guard, large enough to be cut or not.
        unwritten_reads: KV slots read before they were written, over all layers; None: nobody watched.
    """

    policy: str
    requests: int
    wrong: int
    steps: int
    eligible: int
    split: int
    vetoed: int
    reordered: int
    unwritten_reads: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Serve a workload on a small mixture-of-experts model: whole, cut into microbatches without a guard, "
        "under vLLM's rule, and under the guard's. Exit 1 if a guarded run answers a request wrongly. "
        "Under torchrun every rank serves its share."
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=["fewshot"],
        metavar=("NAME", "FILE"),
        help=f"{', '.join(WORKLOADS)}; requests takes a file in Mooncake's format (default: fewshot)",
    )
    parser.add_argument(
        "--limit", type=int, default=40, metavar="N", help="requests to take from FILE (default: 40)"
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        action="append",
        help="run only this one (may be repeated; default: all)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint (default: random)")
    parser.add_argument("--dtype", default="float64", help="of weights and KV cache (default: float64)")
    parser.add_argument("--ubatch-size", type=int, default=2, metavar="N", help="microbatches (default: 2)")
    parser.add_argument(
        "--decode-threshold",
        type=_threshold,
        default=1,
        metavar="TOKENS",
        help="longest query that counts as a decode, or none: keep the order of arrival (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: 0)")
    parser.add_argument(
        "--sanitize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="watch for reads of KV that is not written yet (default: on)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row")


def run(args: argparse.Namespace) -> int:
    """Run the demo; the exit status."""
    import torch

    from .parallel import device_of_rank, init_ranks

    name, *files = args.workload
    problem = None
    if name not in WORKLOADS or len(files) > (name == "requests"):
        problem = f"no workload {' '.join(args.workload)!r}; there are {', '.join(WORKLOADS)}"
    elif args.ubatch_size < 2:
        problem = f"--ubatch-size {args.ubatch_size}: a step is cut into 2 microbatches at least"
    if problem:
        print(f"ubatch-guard demo: {problem}", file=sys.stderr)
        return 2
    kind = args.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        torch.set_num_threads(1)  # the tensors are small; more threads only wait for each other
    device = device_of_rank(kind)
    ranks = init_ranks(device)
    try:
        return _run(args, name, Path(files[0]) if files else None, str(device), ranks)
    except (OSError, ValueError) as error:
        print(f"ubatch-guard demo: {error}", file=sys.stderr)
        return 2
    finally:
        if ranks.size > 1:
            torch.distributed.destroy_process_group()


def _run(args: argparse.Namespace, name: str, file: Path | None, device: str, ranks: Ranks) -> int:
    from .config import EngineConfig, ParallelConfig
    from .llm_engine import load_model
    from .weights import read_config
    from .workloads import EXCERPT, SYNTHETIC, mooncake

    checkpoint_config = read_config(args.model) if args.model else None
    vocab_size = checkpoint_config.vocab_size if checkpoint_config else 512
    if name == "requests":
        workload = mooncake(file or EXCERPT, vocab_size, args.seed, args.limit)
    else:
        workload = SYNTHETIC[name](vocab_size, args.seed)
    config = EngineConfig(
        model_config=checkpoint_config or workload.model_config,
        cache_config=workload.cache_config,
        scheduler_config=workload.scheduler_config,
        parallel_config=ParallelConfig(
            num_ubatches=args.ubatch_size, data_parallel_size=ranks.size, data_parallel_rank=ranks.rank
        ),
        reorder_batch_threshold=args.decode_threshold,
        dtype=args.dtype,
        device=device,
        seed=args.seed,
        sanitize=args.sanitize,
    )
    model = load_model(config, args.model, ranks)
    share = workload.of_rank(ranks.rank, ranks.size)
    printer = _Printer(args.json, ranks.rank == 0, workload.name, len(workload.requests), config)

    whole_config = dataclasses.replace(
        config, parallel_config=dataclasses.replace(config.parallel_config, num_ubatches=1)
    )
    row, right, _ = _serve("whole", "unguarded", share, whole_config, model, ranks, None)
    printer.print(row)
    status, story = 0, None
    for policy in args.policy or POLICIES:
        row, _, stats = _serve(policy, policy, share, config, model, ranks, right)
        printer.print(row)
        if policy == "unguarded":
            story = stats
        if policy in GUARDED and row.wrong:
            status = 1
    if story is not None and story.first_unsafe is not None:
        printer.tell(*story.first_unsafe)
    return status


def _serve(
    policy: str,
    rule: str,
    workload: Workload,
    config: EngineConfig,
    model: DecoderModel,
    ranks: Ranks,
    right: dict[str, list[int]] | None,
) -> tuple[Row, dict[str, list[int]], EngineStats]:
    """One run on a fresh cache: its row, summed over the ranks; this rank's tokens and counts."""
    import torch

    from .guarded import make_runner
    from .llm_engine import LLMEngine

    engine = LLMEngine(config, make_runner(rule, config, model, ranks))
    with _progress(policy, len(workload.requests), ranks.rank == 0) as advance:
        outputs = engine.serve(workload.requests, advance)
    wrong = sum(outputs[req_id] != tokens for req_id, tokens in (right or outputs).items())
    guard = getattr(engine.runner, "ubatch_guard", None)
    reordered = guard.counters.reordered if guard is not None else 0
    stats = engine.stats
    sums = torch.tensor([len(outputs), wrong, reordered, stats.unwritten_reads])
    requests, wrong, reordered, unwritten = ranks.sum(sums).tolist()
    row = Row(
        policy,
        requests,
        wrong,
        stats.steps,
        stats.eligible,
        stats.split,
        stats.eligible - stats.split if config.parallel_config.use_ubatching else 0,
        reordered,
        unwritten if config.sanitize else None,
    )
    return row, outputs, stats


def _threshold(text: str) -> int | None:
    return None if text == "none" else int(text)


class _Printer:
    """Prints the rows on rank 0, as JSON lines or as a table that grows."""

    def __init__(
        self, as_json: bool, on: bool, workload: str, num_requests: int, config: EngineConfig
    ) -> None:
        self._as_json, self._on, self._workload = as_json, on, workload
        self._fields = [field.name for field in dataclasses.fields(Row)]
        self._device, self._dtype = _describe(config.device), config.dtype
        if on and not as_json:
            size = config.parallel_config.data_parallel_size
            where = f"{self._device}, {self._dtype}" + (f", {size} ranks" if size > 1 else "")
            print(f"{workload}: {num_requests} requests, {where}")
            print("  ".join(f"{field:>9}" for field in self._fields))

    def print(self, row: Row) -> None:
        """Print a row."""
        if not self._on:
            return
        values = dataclasses.asdict(row)
        if self._as_json:
            extra = {"workload": self._workload, "device": self._device, "dtype": self._dtype}
            print(json.dumps(values | extra), flush=True)
            return
        cells = ("-" if values[field] is None else values[field] for field in self._fields)
        widths = (max(9, len(field)) for field in self._fields)
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)

    def tell(self, step: int, reads: tuple[UnwrittenRead, ...]) -> None:
        """Say what went wrong first on rank 0's unguarded run."""
        if not self._on or self._as_json:
            return
        blocks = Counter(req_id for req_id, _ in {(read.req_id, read.block) for read in reads})
        most = max(blocks.values())
        print(
            f"unguarded, step {step}: {len(blocks)} requests read up to {most} block{'s' * (most > 1)} each "
            "that a later microbatch had still to write"
        )


def _describe(device: str) -> str:
    """The device by name; torch calls a HIP device ``cuda`` too."""
    import torch

    if device == "cpu":
        return "cpu"
    kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(device)} ({kind})"


@contextmanager
def _progress(policy: str, num_requests: int, on: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over requests, on a terminal that has rich; yields what takes the number finished."""
    if not on or not sys.stderr.isatty():
        yield lambda finished: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda finished: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(policy, total=num_requests)
        yield lambda finished: bar.update(task, completed=finished)
