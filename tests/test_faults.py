"""Faults end the job within 15 seconds; jobs and first runs do not disturb each other."""

import ast
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SCRIPT, Job, arguments, arrays, epochs, load, nc, processes

TWO_RANKS = ("--mode=cpu-cpu", "--batch-size=50", "--gpu=0,1")
LOOPBACK = re.compile(r"[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F")


class WatchedJob(Job):
    """A job that knows what its processes share, and waits until all is gone."""

    def shared_files(self) -> set[Path]:
        """Return the files of /dev/shm that the processes have mapped."""
        maps = "".join((path / "maps").read_text() for path in processes(self.cwd))
        names = set(re.findall(r"/dev/shm/\S+", maps))
        return {Path(name) for name in names if os.path.exists(name)}

    def wait_for_end(self, files: set[Path], seconds=15) -> tuple[int, str]:
        """Return status and errors once no process and none of `files` is left."""
        deadline = time.monotonic() + seconds
        status, _, errors = self.finish(seconds)
        while processes(self.cwd) or any(file.exists() for file in files):
            assert time.monotonic() < deadline, (processes(self.cwd), files)
            time.sleep(0.05)
        return status, errors


@pytest.mark.parametrize(
    "victim, number, moment, workers",
    [
        ("rank", signal.SIGKILL, "training", 1),
        ("parent", signal.SIGTERM, "training", 0),
        ("parent", signal.SIGINT, "training", 0),
        ("parent", signal.SIGKILL, "training", 0),
        ("parent", signal.SIGKILL, "importing", 0),
    ],
)
def test_a_signal_ends_the_whole_job(tiny, tmp_path, victim, number, moment, workers):
    flags = (f"--dataset={tiny}", "--epochs=9999", f"--num-workers={workers}")
    with WatchedJob(*TWO_RANKS, *flags, cwd=tmp_path) as job:
        if moment == "training":
            job.wait_for_line("Epoch 00001")
        while len(job.ranks()) < 2:
            time.sleep(0.05)
        files, rank = job.shared_files(), sorted(job.ranks())[1]
        os.kill(rank if victim == "rank" else job.process.pid, number)
        status, errors = job.wait_for_end(files)
    if victim == "rank":
        assert status == 1
        assert re.fullmatch(r"error: rank 1\b.*SIGKILL\n", errors)
    else:
        assert status == -number  # as the shell reports it
        assert number == signal.SIGKILL or errors == ""
    assert moment == "importing" or len(files) > 10  # the dataset was shared


def test_the_user_reads_the_exception_of_one_rank(tiny, tmp_path):
    """The labels of rank 1's half turn bad after the check, in shared memory."""
    labels = arrays(tiny, "train_set")[1].tobytes()
    flags = (f"--dataset={tiny}", "--epochs=9999")
    with WatchedJob(*TWO_RANKS, *flags, cwd=tmp_path) as job:
        job.wait_for_line("Epoch 00001")
        files = job.shared_files()
        (path,) = (file for file in files if labels in file.read_bytes())
        half = len(labels) // 2
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(labels) + half)
            file.write(b"\x7f" * half)
        status, errors = job.wait_for_end(files)
    assert status == 1
    assert errors.startswith("error: rank ")
    assert errors.count("Traceback") == 1
    assert re.search(r"\nIndexError: Target \d+ is out of bounds", errors)


def listening(job) -> list[str]:
    """Return the addresses, as /proc/net has them, on which the job listens."""
    inodes, addresses = set(), []
    for process in processes(job.cwd):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and inode in inodes:
                    addresses.append(local.partition(":")[0])
    return addresses


def test_two_jobs_agree_beside_a_foreign_server_and_listen_on_loopback_alone(
    tiny, tmp_path
):
    flags = (*TWO_RANKS, f"--dataset={tiny}", "--epochs=20")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # busy already
            stack.enter_context(socket.create_server(("127.0.0.1", 12345)))
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        jobs = [
            stack.enter_context(WatchedJob(*flags, cwd=tmp_path / name))
            for name in ("one", "two")
        ]
        for job in jobs:
            job.wait_for_line("Split: ")  # after the ranks have connected
            addresses = listening(job)
            assert len(addresses) >= 3  # the store's and each rank's
            assert all(map(LOOPBACK.fullmatch, addresses))
        ends = [job.finish() for job in jobs]
    results = [re.findall(r"Epoch .*? \| Time|Test .*", end[1]) for end in ends]
    assert [(end[0], end[2]) for end in ends] == [(0, ""), (0, "")]
    assert results[0] == results[1]
    assert [row["Epoch"] for row in epochs(ends[0][1])] == list(range(20))
    assert float(results[0][-1].split()[-1]) > 0.5  # 4 classes


def first_load(folder: Path) -> multiprocessing.Process:
    """Start a process that loads the synthetic dataset in `folder`, as the script does.

    Forked, it is at work at once, so that a delay hits the moment that it means.
    """

    def work():
        os.chdir(folder)
        nc.load_dataset(arguments("--dataset=synthetic"), 1)

    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def contents(folder: Path) -> list[torch.Tensor]:
    dataset = load(folder / "datasets/synthetic")
    sets = (getattr(dataset.tasks[0], name)[:] for name in nc.SETS)
    feature = dataset.feature.read("node", None, "feat")
    graph = dataset.graph
    return [
        graph.csc_indptr,
        graph.indices,
        feature,
        *(t for pair in sets for t in pair),
    ]


def same(one: Path, other: Path) -> bool:
    return all(map(torch.equal, contents(one), contents(other)))


def test_a_killed_first_load_leaves_nothing_that_is_taken_for_complete(
    folder, tmp_path
):
    start, undisturbed = time.monotonic(), first_load(tmp_path / "undisturbed")
    undisturbed.join()
    duration, interrupted = time.monotonic() - start, 0
    for number, share in enumerate(np.linspace(0.1, 0.95, 10)):
        run = tmp_path / str(number)
        process = first_load(run)
        process.join(share * duration)
        process.kill()
        process.join()
        started = (run / "datasets").exists()
        interrupted += started and not (run / "datasets/synthetic").exists()
        again = first_load(run)
        again.join()
        assert again.exitcode == 0
        assert same(run, folder)
        assert os.listdir(run / "datasets") == ["synthetic"]
    assert interrupted >= 3


def test_first_loads_at_the_same_time_all_succeed(folder, tmp_path):
    loads = [first_load(tmp_path) for _ in range(3)]
    for process in loads:
        process.join()
    assert [process.exitcode for process in loads] == [0, 0, 0]
    assert same(tmp_path, folder)


def test_torch_load_runs_no_code_from_a_file():
    calls = [
        node
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    for call in calls:
        keywords = {
            keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords
        }
        assert keywords["weights_only"] == "True"
