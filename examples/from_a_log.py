"""From a log of requests to unsafe steps, in Python: what ``ubatch-guard simulate`` does."""

from pathlib import Path
from tempfile import TemporaryDirectory

from ubatch_guard.simulate.requests import LogOptions, RequestLog
from ubatch_guard.simulate.steps import EngineOptions, Simulation
from ubatch_guard.trace.audit import AuditedStep, AuditOptions, Auditor

# Eight questions behind one long preamble, all at once; your own log goes here.
LOG = "".join(f'{{"prompt": "{"preamble " * 400}question {number}"}}\n' for number in range(8))


def tell(step: AuditedStep) -> None:
    """Print who reads whose blocks in a step that is unsafe at its cut."""
    if step.verdict is not None and step.hazardous:
        cuts, ids = step.verdict.unsafe[0], step.record.request_ids
        reader, writer = ids[cuts.reader], ids[cuts.writer]
        print(f"cuts {cuts.first} to {cuts.last}: request {reader} reads what {writer} writes")


with TemporaryDirectory() as folder:
    path = Path(folder, "requests.jsonl")
    path.write_text(LOG)
    options = EngineOptions()
    auditor = Auditor(path.name, options.header(path.name), AuditOptions(), on_audited=tell)
    with RequestLog(path, LogOptions(block_size=options.block_size)) as log:
        for number, record in enumerate(Simulation(log, options), start=2):
            auditor.step(record, number)
    audit = auditor.result()
print(
    f"{audit.steps} steps, {audit.eligible} would be cut, {audit.hazardous} unsafe, {audit.kept} kept split"
)
