"""The page of a run in a browser, where there is one: its charts are drawn, without an error."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_pages import write_run

from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.run_page import run_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# As a person does who opens every section and points at the middle of each chart, once by each axis.
LOOK = """<script>
addEventListener("load", () => setTimeout(() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  setTimeout(() => ["steps", "minutes"].forEach(axis => {
    const controls = document.getElementById("controls");
    controls.axis.value = axis;
    controls.dispatchEvent(new Event("input"));
    for (const svg of document.querySelectorAll("figure.chart > svg")) {
      const {left, width, top} = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: left + 50 + (width - 68) / 2, clientY: top}));
      const parts = ["figcaption", ".legend"].map(part => svg.parentNode.querySelector(part).textContent);
      document.body.append(`\\n${parts.join(" | ")}`);
    }
  }), 1000);
}, 100));
</script></body>"""


def seen(page: Path) -> tuple[str, str]:
    """The page after all that, and what the browser has told."""
    page.write_text(page.read_text().replace("</body>", LOOK))
    words = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    found = subprocess.run(
        [BROWSER or "", *words.split(), "--virtual-time-budget=3000", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return found.stdout, found.stderr


@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)}")
def test_charts_are_drawn_and_values_shown_under_the_pointer(tmp_path: Path):
    write_run(folder := tmp_path / "a <run>", steps=4)
    with MetricsWriter(folder) as metrics:
        metrics.write(
            5, {"train/entropy": 1.7e308, "train/learning_rate": 1e-6, "train/loss": math.nan}
        )
        metrics.write(6, {"train/entropy": -1.7e308, "train/behavior_gap": 0.0})
    (page := tmp_path / "page.html").write_text(run_page(folder))
    dom, told = seen(page)
    assert "CONSOLE" not in told, told
    charts = re.findall(r'<figure class="chart".*?<svg[^>]*>(.*?)</svg>', dom, re.DOTALL)
    assert len(charts) > 10 and all('class="line"' in chart for chart in charts)
    for place in ("step 3", r"0\.13\d* min "):  # the nearest that there is: that of step 2
        assert re.search(rf"^reward{place} \| reward/mean 0.25eval/reward ", dom, re.MULTILINE)


@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)}")
def test_a_long_run_of_many_metrics_is_drawn_at_the_height_of_its_means(tmp_path: Path):
    rows = [{"step": step, "reward/mean": float(step % 10 == 0)} for step in range(1, 3001)]
    rows[:600] = [row | {f"reward/f{i}/mean": 0.5 for i in range(230)} for row in rows[:600]]
    for step, loss in ((1, 0.9), (2, None), (3, 0.8)):
        rows[step] |= {"eval/loss": loss, "eval/loss_ci95": loss and loss / 90}
    text = "".join(f"{json.dumps({'time': 1.0, **row})}\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    (page := tmp_path / "page.html").write_text(run_page(tmp_path))
    dom, told = seen(page)
    assert "CONSOLE" not in told, told
    reward, loss = re.findall(r'<figure class="chart".*?<svg[^>]*>(.*?)</svg>', dom, re.DOTALL)[:2]
    (line,) = re.findall(r'class="line" d="(.*?)"', reward)
    tops = [float(top) for top in re.findall(r"[ML][\d.]+ ([\d.]+)", line)]
    ticks = re.findall(r'y1="([\d.]+)".*?<text [^>]*>([\d.]+)</text>', reward)
    top_of = {float(value): float(top) for top, value in ticks}
    mean = (top_of[0] - sum(tops) / len(tops)) / (top_of[0] - top_of[1])
    assert mean == pytest.approx(0.1, abs=0.02)
    assert float(re.findall(r"<text [^>]*>([\d.]+)</text>", loss)[0]) > 0.7
