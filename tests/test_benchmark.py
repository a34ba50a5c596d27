"""Every part of the benchmark still runs; no timing is asserted."""

import json
import os
import re
import sys
from unittest import mock

import benchmark
import torch.multiprocessing as mp
from conftest import fork

FLAGS = "--size=tiny --ranks=1 --repeats=1 --steps=1 --epochs=1 --batch-size=300"


def test_every_part_measures_every_contestant_and_prints_its_table(
    tmp_path, monkeypatch, capsys
):
    figures = tmp_path / "figures.json"
    flags = [*FLAGS.split(), f"--folder={tmp_path}", f"--json={figures}"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *flags])
    monkeypatch.setattr(mp, "spawn", fork)  # ranks that need not import
    with mock.patch.dict(os.environ):
        benchmark.main()
    rows = json.loads(figures.read_text())["runs"]
    assert {row["part"] for row in rows} == set(benchmark.PARTS) - {"levers"}
    speed = [row for row in rows if row["part"] == "speed"]
    assert [row["contestant"] for row in speed] == list(benchmark.CONTESTANTS)
    assert all(row["training seeds/s"] > 0 for row in speed)
    assert all(row["evaluation seeds/s"] > 0 for row in speed)
    headings = re.findall(r"^\| (\w+), 1 rank", capsys.readouterr().out, re.MULTILINE)
    assert sorted(headings) == sorted({row["part"] for row in rows})
