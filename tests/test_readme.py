"""README, header, --help and code say the same, and what they show runs."""

import ast
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPT, Job, arrays, epochs
from torch import nn

import node_classification as nc

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SOURCE = SCRIPT.read_text()


def lines(*languages):
    """Return the command lines of the fenced blocks, without comments."""
    text = "\n".join(block for language, block in BLOCKS if language in languages)
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def launches():
    """Return the flags of each line that starts the script, in README and header."""
    header = [line.strip() for line in nc.__doc__.splitlines()]
    tables = re.findall(r"`(python node_classification.py.*?)`", README)
    found = [*lines("sh"), *tables, *header]
    found = [line for line in found if "node_classification.py" in line]
    found = [line for line in found if re.match(r"(srun )?(python|torchrun) ", line)]
    return [line.partition(" #")[0] for line in found]


@pytest.mark.parametrize("line", launches())
def test_every_launch_line_parses(line, monkeypatch):
    words = shlex.split(line)
    start = words.index("node_classification.py")
    monkeypatch.setattr(sys, "argv", words[start:])
    nc.parse_args()
    if "torchrun" in words:
        from torch.distributed.run import parse_args as parse_torchrun

        launcher = words[words.index("torchrun") + 1 :]
        assert parse_torchrun(launcher).training_script == "node_classification.py"


def test_there_are_launch_lines_for_every_kind_of_hardware():
    assert len(launches()) >= 12
    header = nc.__doc__
    for flags in ("--mode=cpu-cpu", "--gpu=0,1,2,3", "torchrun --standalone"):
        assert flags in header


def test_the_flags_table_is_the_parser():
    section = README.partition("## Flags")[2].partition("## ")[0]
    table = re.findall(r"^\| `(--[\w-]+)` \| (.+?) \|", section, re.MULTILINE)
    documented = {
        flag.lstrip("-").replace("-", "_"): re.findall(r"`(.+?)`", default)
        for flag, default in table
    }
    parsed = vars(parse_defaults())
    assert list(documented) == list(parsed)
    for name, value in parsed.items():
        if name in ("gpu", "fanout"):
            value = ",".join(map(str, value))
        shown = documented[name]
        if name == "mode":
            assert (value, shown) == (None, ["pinned-cuda", "cpu-cpu"])
        elif value is None:
            assert shown == []
        else:
            assert shown == [str(value)]


def parse_defaults():
    argv, sys.argv = sys.argv, ["node_classification.py"]
    try:
        return nc.parse_args()
    finally:
        sys.argv = argv


def test_help_names_every_flag():
    command = [sys.executable, SCRIPT, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"--[a-z][\w-]+", shown)) - {"--help"} == {
        "--" + name.replace("_", "-") for name in vars(parse_defaults())
    }


def test_everything_that_the_readme_names_exists():
    names = {node.name for node in ast.walk(ast.parse(SOURCE)) if hasattr(node, "name")}
    for name in re.findall(r"`(\w+)`(?! \(HOST)", README):
        if name in (
            "nan",
            "feat",
            "drop_last",
            "drop_uneven_inputs",
            "torchrun",
            "known",
        ):
            continue
        if re.fullmatch(r"[a-z_]+_[a-z_]+|main|run|train|evaluate|known", name):
            assert name in names or name in SOURCE, name
    for name in re.findall(r"`((?:tests/|\.ci/)?[\w.-]+\.(?:py|txt|md))`", README):
        known = name in ("examples", "DEVELOPERS.md")
        assert known or (ROOT / name).exists(), name
    flags = set(re.findall(r"`?(--[a-z][a-z-]+)", README))
    ours = {"--" + name.replace("_", "-") for name in vars(parse_defaults())}
    foreign = {
        "--standalone",
        "--nproc-per-node",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-id",
        "--rdzv-endpoint",
        "--max-restarts",
        "--ipc",
        "--shm-size",
        "--nodes",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--cpus-per-task",
        "--python",
    }
    from_benchmark = set(
        re.findall(r"--[a-z-]+", (ROOT / "tests/benchmark.py").read_text())
    )
    assert flags <= ours | foreign | from_benchmark


def test_the_readmes_own_graph_trains(tmp_path):
    (block,) = [code for language, code in BLOCKS if language == "python"]
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)
    (line,) = [line for line in lines("sh") if "my_graph" in line]
    flags = shlex.split(line)[2:]
    with Job(*flags, "--epochs=1", cwd=tmp_path) as job:
        status, output, errors = job.finish()
    assert (status, errors) == (0, "")
    assert "Split: 300 train, 100 validation, 100 test" in output


def test_the_quick_start_reaches_the_accuracy_and_repeats_the_output_shown(tmp_path):
    quick = BLOCKS[0][1].splitlines()[-1]
    assert quick == "python node_classification.py --gpu=0,1 --dataset=synthetic"
    with Job(*shlex.split(quick)[2:], cwd=tmp_path) as job:
        status, output, _ = job.finish(timeout=300)
    assert status == 0
    accuracy = float(output.splitlines()[-1].removeprefix("Test Accuracy "))
    assert accuracy > 0.90
    (shown,) = [block for language, block in BLOCKS if language == "text"]
    assert [line.split(" |")[0] for line in shown.splitlines() if "Epoch" in line] == [
        "Epoch 00000",
        "Epoch 00001",
        "Epoch 00009",
    ]
    printed = {row["Epoch"]: row for row in epochs(output)}
    for row in epochs(shown):
        for field in ("Average Loss", "Accuracy"):
            assert row[field] == pytest.approx(printed[row["Epoch"]][field], abs=0.01)


def test_a_linear_classifier_on_the_features_alone_is_weak(folder):
    path = folder / "datasets" / "synthetic"
    feat = torch.from_numpy(np.load(path / "feat.npy"))
    seeds, labels = map(torch.from_numpy, arrays(path, "train_set"))
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(feat[seeds]), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    seeds, labels = map(torch.from_numpy, arrays(path, "test_set"))
    accuracy = (model(feat[seeds]).argmax(1) == labels).float().mean().item()
    print(f"\nlinear classifier on the features alone: {accuracy:.2f}")
    assert 0.30 < accuracy <= 0.60


def test_the_synthetic_graph_is_heavy_tailed_homophilous_and_repeats(folder, tmp_path):
    path = folder / "datasets" / "synthetic"
    nc.write_synthetic(tmp_path / "again")
    assert (tmp_path / "again/edges.npy").read_bytes() == (
        path / "edges.npy"
    ).read_bytes()
    source, target = np.load(path / "edges.npy")
    degrees = np.sort(np.bincount(target, minlength=40_000))
    assert degrees[-4_000:].sum() > 0.35 * degrees.sum()  # a tenth of the nodes
    labels = np.empty(40_000, int)
    for name in ("train_set", "validation_set", "test_set"):
        seeds, values = arrays(path, name)
        labels[seeds] = values
    assert 0.75 < (labels[source] == labels[target]).mean() < 0.90


def test_the_script_keeps_to_its_lengths():
    end = next(
        n.end_lineno for n in ast.parse(SOURCE).body if getattr(n, "name", "") == "run"
    )
    assert end <= 320
    assert len(SOURCE.splitlines()) < 600
