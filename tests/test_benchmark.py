"""The benchmark still runs; no timing is asserted."""

import json
import re
import subprocess
import sys

from conftest import ROOT, environment

PARTS = ["step", "memory"]  # the others take minutes
FLAGS = ["--size=tiny", "--ranks=1", "--repeats=1", "--steps=1", "--epochs=1"]


def test_the_benchmark_runs(tmp_path):
    flags = [
        *FLAGS,
        "--parts=step,memory",
        f"--folder={tmp_path}",
        f"--json={tmp_path / 'figures.json'}",
    ]
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
    assert {row["part"] for row in figures["runs"]} >= set(PARTS)
    headings = re.findall(r"^\| (\w+), 1 rank", run.stdout, re.MULTILINE)
    assert set(PARTS) <= set(headings)
