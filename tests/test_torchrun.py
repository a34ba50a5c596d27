"""Under torchrun the script gives what it gives alone, on one machine and on several."""

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT, Job, nc, processes, results, run_script

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.2")
FLAGS = ("--mode=cpu-cpu", "--batch-size=10", "--epochs=6")


@pytest.fixture(scope="session")
def spawned(tiny):
    """The results of a run with 2 spawned ranks."""
    flags = (*FLAGS, f"--dataset={tiny}", "--gpu=0,1")
    status, output, errors = run_script(*flags, cwd=tiny.parent)
    assert (status, errors) == (0, "")
    return results(output)


def torchrun(*agent, script=SCRIPT, flags=(), prefix=(), cwd, **env) -> Job:
    """Start an agent on this machine."""
    launcher = (*prefix, *TORCHRUN, *agent, str(script))
    return Job(*flags, cwd=cwd, launcher=launcher, **env)


def assert_ended(cwd, seconds=10):
    deadline = time.monotonic() + seconds
    while processes(cwd):
        assert time.monotonic() < deadline, processes(cwd)
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_one_agent_gives_what_a_spawned_run_gives(tiny, tmp_path, spawned):
    flags = (*FLAGS, f"--dataset={tiny}")
    with torchrun(
        "--standalone", "--nproc-per-node=2", flags=flags, cwd=tmp_path
    ) as job:
        status, output, _ = job.finish()
    assert status == 0
    assert results(output) == spawned
    assert output.count("Processes: 2\n") == 1
    assert_ended(tmp_path)


def test_two_agents_with_1_and_2_ranks_give_what_3_ranks_of_one_machine_give(
    tmp_path, forked
):
    """Both find a folder that is not preprocessed; the first to come does it."""
    nc.write_synthetic(tmp_path / "raw", nodes=600, edges=6000, width=8, classes=4)
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    common = ("--nnodes=2", "--rdzv-backend=c10d", endpoint, "--local-addr=127.0.0.1")
    flags = (*FLAGS, f"--dataset={tmp_path / 'raw'}")
    start = functools.partial(torchrun, flags=flags, cwd=tmp_path)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}  # whatever the machine's name is
    expected = results(forked(*FLAGS, ranks=3))
    with (
        start(*common, "--nproc-per-node=1", **loopback) as one,
        start(*common, "--nproc-per-node=2", **loopback) as two,
    ):
        ends = [job.finish() for job in (one, two)]
    assert [status for status, *_ in ends] == [0, 0], ends
    assert sorted(map(results, (output for _, output, _ in ends))) == [[], expected]
    assert_ended(tmp_path)


def test_a_gpu_list_shorter_than_the_local_ranks_is_refused_once(tiny, tmp_path):
    flags = (*FLAGS, f"--dataset={tiny}", "--gpu=0")
    with torchrun(
        "--standalone", "--nproc-per-node=2", flags=flags, cwd=tmp_path
    ) as job:
        status, output, errors = job.finish()
    (line,) = (line for line in errors.splitlines() if line.startswith("error: "))
    assert status != 0
    assert "--gpu" in line
    assert "2 ranks" in line
    assert output == ""
    assert_ended(tmp_path)


def test_torchruns_one_thread_is_not_taken_for_the_users_choice(tiny, tmp_path):
    script = tmp_path / "threads.py"
    script.write_text(
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch, node_classification as nc\n"
        "os.sched_getaffinity = lambda pid: range(6)\n"  # as on 6 cores
        "real = nc.run\n"
        "nc.run = lambda *a: (print('threads', torch.get_num_threads()), real(*a))\n"
        "nc.main()\n"
    )
    flags = (*FLAGS, "--epochs=0", f"--dataset={tiny}")
    agent = ("--standalone", "--nproc-per-node=2")
    start = functools.partial(torchrun, *agent, script=script, flags=flags)
    with (
        start(prefix=("env", "-u", "OMP_NUM_THREADS"), cwd=tmp_path) as unset,
        start(prefix=("env", "OMP_NUM_THREADS=2"), cwd=tmp_path) as chosen,
    ):
        assert re.findall("threads .*", unset.finish()[1]) == ["threads 3"] * 2
        assert re.findall("threads .*", chosen.finish()[1]) == ["threads 2"] * 2


@pytest.fixture
def hosts():
    """Two network namespaces, joined by veth; addresses 10.99.0.1 and 10.99.0.2."""
    names = [f"nc-{os.getpid()}-{number}" for number in (1, 2)]

    def ip(*words, check=True):
        subprocess.run(["ip", *words], check=check, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        one, two = (("eth0", "netns", name) for name in names)
        ip("link", "add", *one, "type", "veth", "peer", "name", *two)
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", name, "true")
    except OSError as error:
        pytest.skip(f"ip (iproute2) cannot be run: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.strip()}")
    else:
        yield names
    finally:
        with contextlib.suppress(OSError):
            for name in names:
                ip("netns", "delete", name, check=False)


def test_two_hosts_give_what_a_spawned_run_gives(tiny, tmp_path, spawned, hosts):
    jobs = []
    with contextlib.ExitStack() as stack:
        for number, host in enumerate(hosts, 1):
            job = torchrun(
                "--nnodes=2",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=10.99.0.1:29500",
                f"--rdzv-conf=is_host={number == 1}",
                f"--local-addr=10.99.0.{number}",
                flags=(*FLAGS, f"--dataset={tiny}"),
                prefix=("ip", "netns", "exec", host),
                cwd=tmp_path,
                GLOO_SOCKET_IFNAME="eth0",
            )
            jobs.append(stack.enter_context(job))
        ends = [job.finish() for job in jobs]
    assert [status for status, *_ in ends] == [0, 0], ends
    assert sorted(map(results, (output for _, output, _ in ends))) == [[], spawned]
    assert_ended(tmp_path)


def test_a_killed_rank_is_restarted_and_goes_on_from_the_snapshot(
    tiny, tmp_path, spawned
):
    agent = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    flags = (*FLAGS, f"--dataset={tiny}", "--snapshot=snapshot.pt")
    with torchrun(*agent, flags=flags, cwd=tmp_path) as job:
        output = job.wait_for_line("Epoch 00000") + job.wait_for_line("Epoch 00001")
        for folder in processes(tmp_path):
            ours = SCRIPT.name.encode() in (folder / "cmdline").read_bytes()
            if ours and b"\0RANK=0\0" in (folder / "environ").read_bytes():
                os.kill(killed := int(folder.name), signal.SIGKILL)
        status, rest, errors = job.finish()
    lines = results(output + rest)
    assert status == 0
    assert "SIGKILL" in errors or "-9" in errors
    assert rest.count("Processes: 2\n") == 1  # the restart
    assert sorted(set(lines)) == sorted(spawned)
    assert len(lines) - len(spawned) <= 1
    assert_ended(tmp_path)
    assert not list(Path("/dev/shm").glob(f"torch_{killed}_*"))
