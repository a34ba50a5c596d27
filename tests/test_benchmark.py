"""The benchmark still runs, all its parts; no timing is asserted."""

import json
import re
import subprocess
import sys

from conftest import ROOT, environment

PARTS = ["speed", "levers", "step", "memory", "startup", "growth"]
FLAGS = ["--size=tiny", "--ranks=1", "--repeats=1", "--steps=1", "--epochs=1"]


def test_the_benchmark_runs_all_its_parts(tmp_path):
    flags = [*FLAGS, f"--folder={tmp_path}", f"--json={tmp_path / 'figures.json'}"]
    run = subprocess.run(
        [sys.executable, ROOT / "tests/benchmark.py", *flags],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {row["part"] for row in figures["runs"]} == set(PARTS)
    headings = re.findall(r"^\| (\w+), 1 rank", run.stdout, re.MULTILINE)
    assert set(PARTS) - {"levers"} <= set(headings)
