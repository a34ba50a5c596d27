"""A snapshot continues a run exactly, and is never lost, damaged or misread."""

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from conftest import Job, arguments, epochs, nc, results, run_script

FLAGS = ("--mode=cpu-cpu", "--batch-size=10")


def parts(path, *flags, seed=0):
    """Return arguments, a random model and an optimizer that has made a step."""
    args = arguments("--dataset=made-up", f"--snapshot={path}", *flags)
    torch.manual_seed(seed)
    model = nc.SAGE(8, 256, 4, len(args.fanout))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return args, model, optimizer


def try_resume(rank, path, *flags) -> str | int:
    """Return the epochs that resume() finds done, or the message that it ends with."""
    args, model, optimizer = parts(path, *flags)
    try:
        return nc.resume(rank, args, model, optimizer)
    except SystemExit as stop:
        return stop.code


def try_save(rank, path, epoch) -> str | None:
    args, model, optimizer = parts(path)
    try:
        return nc.save_snapshot(args, epoch, model, optimizer)
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def snapshot(tmp_path, in_ranks):
    """The file of a run that has done 3 epochs."""
    path = tmp_path / "snapshot.pt"
    in_ranks(1, try_save, path, 3)
    return path


def test_a_killed_job_resumes_as_if_nothing_had_happened(tiny, tmp_path, forked):
    whole = results(forked("--epochs=6"))
    flags = (f"--dataset={tiny}", "--gpu=0,1", "--epochs=6", "--snapshot=snapshot.pt")
    with Job(*FLAGS, *flags, cwd=tmp_path) as job:
        output = job.wait_for_line("Epoch 00000") + job.wait_for_line("Epoch 00001")
        os.kill(min(job.ranks()), signal.SIGKILL)
        before = results(output + job.finish()[1])
    status, output, errors = run_script(*FLAGS, *flags, cwd=tmp_path)
    after = results(output)
    assert (status, errors) == (0, "")
    assert before == whole[: len(before)]
    assert after == whole[-len(after) :]
    assert 2 <= len(before) < 6
    assert len(before + after) - len(whole) in (0, 1)  # at most one epoch repeated


def test_a_finished_run_only_tests(tmp_path, forked):
    path = tmp_path / "snapshot.pt"
    flags = ("--epochs=2", f"--snapshot={path}")
    first, made = results(forked(*flags)), path.read_bytes()
    assert len(first) == 3
    assert results(forked(*flags)) == first[-1:]
    assert path.read_bytes() == made


def test_another_number_of_ranks_continues(tmp_path, forked):
    snapshot = f"--snapshot={tmp_path / 'snapshot.pt'}"
    first = epochs(forked("--epochs=2", snapshot))
    then = epochs(forked("--epochs=4", snapshot, ranks=1))
    assert [row["Epoch"] for row in first + then] == [0, 1, 2, 3]
    assert then[0]["Average Loss"] < first[1]["Average Loss"]


def test_all_ranks_resume_with_the_saved_model_and_optimizer(snapshot, in_ranks):
    def resumed(rank):
        args, model, optimizer = parts(snapshot, seed=rank + 1)
        epoch = nc.resume(rank, args, model, optimizer)
        return epoch, model.state_dict(), optimizer.state_dict()

    saved = torch.load(snapshot, weights_only=True)
    for epoch, model, optimizer in in_ranks(2, resumed):
        assert epoch == 3
        torch.testing.assert_close(model, saved["model"], rtol=0, atol=0)
        torch.testing.assert_close(
            optimizer["state"], saved["optimizer"]["state"], rtol=0, atol=0
        )


def test_all_ranks_start_alike_from_a_snapshot_of_no_epoch(tmp_path, in_ranks):
    """As a run leaves it that died in its first epoch; the learning rate may change."""

    def resumed(rank):
        args, model, optimizer = parts(path, "--lr=0.5", seed=rank + 1)
        epoch = nc.resume(rank, args, model, optimizer)
        return epoch, model.state_dict(), optimizer.param_groups[0]["lr"]

    path = tmp_path / "snapshot.pt"
    in_ranks(1, try_save, path, 0)
    saved = torch.load(path, weights_only=True)
    for epoch, model, lr in in_ranks(2, resumed):
        assert (epoch, lr) == (0, 0.5)
        torch.testing.assert_close(model, saved["model"], rtol=0, atol=0)


def random_bytes(path):
    path.write_bytes(random.Random(0).randbytes(10_000))


def flipped_bits(path):
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 1000):
        data[at] ^= 0xFF
    path.write_bytes(data)


class Touch:
    """Pickles as a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def running_code(path):
    torch.save({"model": {}, "code": Touch(path.parent / "pickle-ran")}, path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        random_bytes,
        flipped_bits,
        lambda path: path.write_bytes(pickle.dumps({"epoch": 3})),
        lambda path: torch.save(torch.ones(3), path),
        lambda path: torch.save({"epoch": 3, "model": {}}, path),
        running_code,
    ],
    ids=[
        "truncated",
        "empty",
        "random",
        "flipped",
        "pickle",
        "tensor",
        "other model",
        "running code",
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_kept(snapshot, in_ranks, damage):
    damage(snapshot)
    before = snapshot.read_bytes()
    (message,) = in_ranks(1, try_resume, snapshot)
    assert message.startswith(f"error: --snapshot={snapshot}: ")
    assert "\n" not in message
    assert snapshot.read_bytes() == before
    assert os.listdir(snapshot.parent) == [snapshot.name]  # so no code ran either


@pytest.mark.parametrize(
    "flag, made, ours",
    [
        ("--fanout=5,5,5", "10, 10, 10", "5, 5, 5"),
        ("--fanout=5,5", "10, 10, 10", "5, 5"),
        ("--seed=12", "0", "12"),
        ("--dataset=other", "made-up", "other"),
    ],
)
def test_a_file_of_another_run_is_refused_and_kept(
    snapshot, in_ranks, flag, made, ours
):
    before = snapshot.read_bytes()
    (message,) = in_ranks(1, try_resume, snapshot, flag)
    assert message.startswith(f"error: --snapshot={snapshot}: ")
    assert "\n" not in message
    for part in (flag.partition("=")[0].strip("-"), made, ours):
        assert part in message
    assert snapshot.read_bytes() == before


def test_the_user_reads_the_refusal_in_one_line(tiny, snapshot):
    flags = (*FLAGS, f"--dataset={tiny}", "--gpu=0,1", f"--snapshot={snapshot}")
    status, output, errors = run_script(*flags, cwd=snapshot.parent)
    assert status == 1
    assert "Epoch" not in output
    assert re.fullmatch(r"error: --snapshot=.*made-up.*\n", errors)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB; a snapshot of parts() has about 2."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder))
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no tmpfs: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("place", ["missing", "a file", "read-only", "full"])
def test_a_place_that_cannot_be_written_is_noticed_before_training(
    forked, request, tmp_path, capfd, place
):
    mounted = place in ("read-only", "full")
    disk = request.getfixturevalue("small_disk") if mounted else tmp_path
    path = disk / place / "snapshot.pt"
    if place != "missing":
        path.parent.mkdir()
    if place == "a file":
        path.parent.rmdir()
        path.parent.touch()
    elif place == "read-only":
        mount = ("mount", "-o", "remount,ro", str(disk))
        subprocess.run(mount, check=True)
    elif place == "full":
        fill(disk)
    with pytest.raises(mp.ProcessExitedException):
        forked(f"--snapshot={path}", ranks=1)
    output, errors = capfd.readouterr()
    assert "Epoch" not in output
    assert re.fullmatch(rf"error: --snapshot={path}: .*\n", errors)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", 0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_disk_that_fills_up_keeps_the_older_snapshot(small_disk, in_ranks):
    path = small_disk / "snapshot.pt"
    assert in_ranks(1, try_save, path, 3) == [None]
    before = path.read_bytes()
    fill(small_disk)
    (message,) = in_ranks(1, try_save, path, 4)
    (small_disk / "filler").unlink()
    assert re.fullmatch(rf"error: --snapshot={path}: .*No space left.*", message)
    assert path.read_bytes() == before
    assert in_ranks(1, try_resume, path) == [3]


def test_a_kill_at_any_moment_leaves_a_snapshot_that_loads(snapshot, in_ranks):
    def save_for_ever():
        args, model, optimizer = parts(snapshot)
        for epoch in range(4, 10**6):
            nc.save_snapshot(args, epoch, model, optimizer)

    delays, rounds, partial, found = random.Random(0), 0, 0, set()
    while rounds < 25 or partial < 5:  # so many are killed while they write
        rounds += 1
        assert rounds < 300
        before = snapshot.stat().st_mtime_ns
        process = multiprocessing.get_context("fork").Process(target=save_for_ever)
        process.start()
        while snapshot.stat().st_mtime_ns == before:  # it has begun to save
            time.sleep(0.001)
        time.sleep(delays.uniform(0, 0.03))
        process.kill()
        process.join()
        partial += Path(f"{snapshot}.partial").exists()
        saved = torch.load(snapshot, weights_only=True)
        found.add(saved["epoch"])
        assert len(saved["model"]) == 9
    assert min(found) >= 4
