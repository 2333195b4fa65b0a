"""The site of graphs, opened in a headless browser. ``make dashboard`` makes it and then runs this."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
GRAPHS = (
    "bench_check.Ratio.track_mirror",
    "bench_check.Check.time_stateless",
    "bench_mirror.Upkeep.track_upkeep",
)
LEAST_POINTS = 8
LEAST_PIXELS = 500
"""Coloured pixels of a graph with lines. One without has none: axes and grid are grey."""

# Runs beside the graph: once that has had its time, count what is drawn in colour.
PROBE = """<!DOCTYPE html><body><iframe src="index.html#{graph}" width="1280" height="900"></iframe><script>
setTimeout(() => {{
    let coloured = 0;
    for (const canvas of document.querySelector("iframe").contentDocument.querySelectorAll("canvas")) {{
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < pixels.length; i += 4) {{
            const [r, g, b, a] = pixels.slice(i, i + 4);
            coloured += a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60;
        }}
    }}
    document.body.id = "coloured-" + coloured;
}}, 10000);
</script></body>"""


def _dashboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "scripts" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site() -> Path:
    folder: Path = _dashboard().SITE
    if not (folder / "index.json").exists():
        pytest.skip("no dashboard: make dashboard")
    return folder


def test_graphs_have_a_point_for_each_of_eight_commits(site: Path) -> None:
    for name in GRAPHS:
        graphs = [path for path in site.glob(f"graphs/**/{name}.json") if "summary" not in path.parts]
        assert graphs, name
        for path in graphs:
            points = [values for _, values in json.loads(path.read_text()) if any(values)]
            assert len(points) >= LEAST_POINTS, name


@pytest.mark.parametrize("graph", [*GRAPHS, None])
def test_the_browser_draws_them(site: Path, tmp_path: Path, graph: str | None) -> None:
    dashboard = _dashboard()
    if dashboard.browser() is None:
        pytest.skip("no Chromium (Debian: apt install chromium)")
    if missing := dashboard.make_standalone(site):
        pytest.skip(
            f"the pages would load libraries from the network (Debian: apt install {' '.join(missing)})"
        )
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    if graph is None:
        # The control: a graph whose data is gone must not count as drawn.
        graph = GRAPHS[0]
        for path in copy.glob(f"graphs/**/{graph}.json"):
            path.write_text("[]")
        expected = range(1)
    else:
        expected = range(LEAST_PIXELS, 1_000_000)
    (copy / "probe.html").write_text(PROBE.format(graph=graph))
    with dashboard.serve(copy) as url:
        document = dashboard.browse(f"{url}/probe.html")
    found = re.search(r'<body id="coloured-(\d+)"', document)
    assert found is not None
    assert int(found[1]) in expected
