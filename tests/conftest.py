"""Set-up that the tests share: small datasets, forked ranks, runs of the script."""

import os

# One thread a process: results repeat bit for bit, and forked ranks are safe.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "node_classification.py"
sys.path.insert(0, str(ROOT))

from dgl import graphbolt as gb

import node_classification as nc

torch.set_num_threads(1)
mp.set_sharing_strategy("file_system")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder whose datasets/synthetic is ready, for runs that need not make it."""
    path = tmp_path_factory.mktemp("runs")
    before = os.getcwd()
    os.chdir(path)
    nc.load_dataset(arguments("--dataset=synthetic"), 1)
    os.chdir(before)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a graph of 600 nodes: 300 to train, 150 to validate, 150 to test."""
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    nc.write_synthetic(path, nodes=600, edges=6000, width=8, classes=4)
    load(path)
    return path


def arguments(*flags: str) -> argparse.Namespace:
    """Parse flags as the script does; the mode is cpu-cpu unless one is given."""
    argv, sys.argv = sys.argv, [str(SCRIPT), "--mode=cpu-cpu", *flags]
    try:
        return nc.parse_args()
    finally:
        sys.argv = argv


def load(path) -> gb.OnDiskDataset:
    """Load an OnDiskDataset without GraphBolt's chatter."""
    with contextlib.redirect_stdout(io.StringIO()):
        return gb.OnDiskDataset(str(path)).load()


def pipeline(args, dataset, name="test_set", is_train=False):
    """Return the script's dataloader for one of a dataset's sets, on the CPU."""
    if args.mode.startswith("cpu"):
        nc.speed_up_cpu(dataset.graph.num_nodes)
    feature = gb.TorchBasedFeature(dataset.feature.read("node", None, "feat"))
    features = gb.BasicFeatureStore({("node", None, "feat"): feature})
    itemset = getattr(dataset.tasks[0], name)
    device = torch.device("cpu")
    return nc.create_dataloader(
        args, dataset.graph, features, itemset, device, is_train
    )


def _rank(rank, world_size, folder, function, args):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(function(rank, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    time.sleep(0.1)  # as at the end of the script's run()
    dist.destroy_process_group()


def fork(function, args, ranks, seconds=120):
    """Run function(rank, *args) in forked processes; fail if one hangs."""
    import torch._dynamo  # noqa: F401 (else each rank imports it, and torchmetrics)
    import torchmetrics.functional  # noqa: F401

    context = mp.start_processes(function, args, ranks, False, start_method="fork")
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()


@pytest.fixture
def in_ranks(tmp_path_factory):
    """Run function(rank, *args) in forked gloo ranks; return what each returned."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def call(world_size, function, *args):
        folder = tmp_path_factory.mktemp("ranks")
        fork(_rank, (world_size, folder, function, args), world_size)
        return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]

    return call


@pytest.fixture
def forked(tiny, tmp_path, capfd):
    """Start the ranks as main() does, but forked: they need not import."""

    def call(*flags, ranks=2) -> str:
        args = arguments("--batch-size=10", f"--dataset={tiny}", *flags)
        (tmp_path / "store").unlink(missing_ok=True)
        store = dist.FileStore(str(tmp_path / "store"), ranks)
        devices = [torch.device("cpu")] * ranks
        rank_args = (ranks, args, devices, nc.load_dataset(args, ranks), store)
        capfd.readouterr()
        fork(nc.run, rank_args, ranks)
        return capfd.readouterr().out

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return call


def environment(**changes) -> dict:
    """Return the environment of a user who has set nothing of PyTorch's."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GLOO_"))}
    return keep | {"OMP_NUM_THREADS": "1"} | changes


class Job:
    """A run of the script, or of torchrun, in a process group of its own."""

    def __init__(self, *flags, cwd, launcher=(sys.executable, str(SCRIPT)), **env):
        self.process = subprocess.Popen(
            [*launcher, *flags],
            cwd=cwd,
            env=environment(WATCHED=str(cwd), **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.cwd = cwd

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def wait_for_line(self, beginning: str) -> str:
        """Read the standard output up to a line that begins so."""
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no line {beginning!r}: {self.process.stderr.read()}")

    def finish(self, timeout=120):
        """Wait for the end; return the status and what is left of both outputs."""
        output, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, output, errors

    def ranks(self) -> list[int]:
        """Return the ids of the spawned ranks."""
        return [
            int(folder.name)
            for folder in processes(self.cwd)
            if b"spawn_main" in (folder / "cmdline").read_bytes()
        ]


def processes(cwd) -> list[Path]:
    """Return the folders in /proc of what the jobs in `cwd` have started and is alive.

    Their environment tells, whatever their parent and session.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"WATCHED={cwd}\0".encode() in (folder / "environ").read_bytes():
                found.append(folder)
    return found


def run_script(*flags, cwd, timeout=120, **env):
    """Run the script to its end; return its status and outputs."""
    with Job(*flags, cwd=cwd, **env) as job:
        return job.finish(timeout)


def epochs(output: str) -> list[dict]:
    """Return the fields of the epoch lines."""
    lines = [line for line in output.splitlines() if line.startswith("Epoch ")]
    return [
        {key: float(value) for key, _, value in (f.rpartition(" ") for f in row)}
        for row in (line.split(" | ") for line in lines)
    ]


def results(output: str) -> list[str]:
    """Return the lines of the epochs and the test, without their times."""
    return re.findall(r"^Epoch .*?(?= \| Time)|^Test .*", output, re.MULTILINE)


def arrays(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a raw set's seeds and labels."""
    return tuple(np.load(path / f"{name}_{field}.npy") for field in ("seeds", "labels"))


def full_graph_logits(path: Path, num_layers: int) -> torch.Tensor:
    """Calculate the seeded SAGE(8, 16, 4) over the whole tiny graph, by dense matrices."""
    source, target = map(torch.from_numpy, np.load(path / "edges.npy"))
    adjacency = torch.zeros(600, 600)
    adjacency.index_put_((target, source), torch.ones(6000), True)
    mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    torch.manual_seed(0)
    model = nc.SAGE(8, 16, 4, num_layers)
    x = torch.from_numpy(np.load(path / "feat.npy"))
    for number, layer in enumerate(model.layers, start=1):
        x = layer.fc_self(x) + layer.fc_neigh(mean @ x)  # fc_self has the bias
        x = x.relu() if number < num_layers else x
    return x
