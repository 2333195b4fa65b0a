"""``ubatch-guard demo``: one workload whole, cut without a guard, and cut under each rule; one row each."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parallel import Ranks

WORKLOADS = ("fewshot", "grpo", "rag", "requests")
POLICIES = ("unguarded", "vllm", "veto", "reorder", "move")
GUARDED = ("veto", "reorder", "move")


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
        help="run only this one (may be repeated; default: all, but move on one rank alone)",
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
    try:
        device = device_of_rank(kind)
        ranks = init_ranks(device)
        return _run(args, name, Path(files[0]) if files else None, str(device), ranks)
    except (OSError, ValueError) as error:
        print(f"ubatch-guard demo: {error}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _run(args: argparse.Namespace, name: str, file: Path | None, device: str, ranks: Ranks) -> int:
    from .comparison import compare, describe, heading, line
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
    leads = ranks.rank == 0
    extra = {"workload": workload.name, "device": describe(device), "dtype": args.dtype}
    if leads and not args.json:
        where = f"{extra['device']}, {args.dtype}" + (f", {ranks.size} ranks" if ranks.size > 1 else "")
        print(f"{workload.name}: {len(workload.requests)} requests, {where}\n{heading()}")

    status, story = 0, None
    with contextlib.ExitStack() as screen:
        progress = _progress_bar(screen) if leads and sys.stderr.isatty() else _no_progress
        policies = args.policy or [policy for policy in POLICIES if policy != "move" or ranks.size == 1]
        for run in compare(policies, workload, config, model, ranks, progress):
            row = run.row
            if leads:
                print(json.dumps(asdict(row) | extra) if args.json else line(row), flush=True)
            if row.policy in GUARDED and row.wrong:
                status = 1
            story = story or run.story()
    if leads and story and not args.json:
        print(story)
    return status


def _threshold(text: str) -> int | None:
    return None if text == "none" else int(text)


def _no_progress(policy: str, num_requests: int) -> Callable[[int], None]:
    return lambda finished: None


def _progress_bar(screen: contextlib.ExitStack) -> Callable[[str, int], Callable[[int], None]]:
    """A bar over the requests of each run; without rich there is none."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return _no_progress
    bar = screen.enter_context(Progress(console=Console(stderr=True), transient=True))

    def start(policy: str, num_requests: int) -> Callable[[int], None]:
        for task in bar.task_ids:
            bar.remove_task(task)
        task = bar.add_task(policy, total=num_requests)
        return lambda finished: bar.update(task, completed=finished)

    return start
