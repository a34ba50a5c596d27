"""Refused arguments cost one line and no time; the rest is settled for the machine."""

import argparse
import os
import sys
import time
from unittest import mock

import pytest
from conftest import SCRIPT, nc, run_script


class Loading(Exception):
    """main() has come as far as loading the dataset."""


@pytest.fixture(autouse=True)
def quiet_start(monkeypatch, tmp_path):
    """An empty folder to work in; nothing is loaded or started, no variable stays."""

    def load(*_):
        raise Loading

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nc, "load_dataset", load)
    with mock.patch.dict(os.environ):
        yield


def machine(monkeypatch, gpus=0, cuda_dgl=True):
    """Pretend that torch finds so many GPUs, and that DGL is built for them or not."""

    monkeypatch.setattr(nc.torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(nc.torch.cuda, "device_count", lambda: gpus)
    api = object() if cuda_dgl else None
    monkeypatch.setattr(nc.dgl._ffi.function, "get_global_func", lambda *_, **__: api)


def main(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    nc.main()


def refusal(monkeypatch, *flags) -> str:
    """Return the line with which main() ends, by way of standard error, status 1."""
    with pytest.raises(SystemExit) as end:
        main(monkeypatch, *flags)
    assert isinstance(end.value.code, str)
    assert "\n" not in end.value.code
    assert not os.listdir()
    return end.value.code


@pytest.mark.parametrize(
    "flag",
    [
        "--gpu=",
        "--gpu=a",
        "--gpu=0,",
        "--gpu=0.5",
        "--gpu=0;1",
        "--gpu=0,1,0",
        "--gpu=-1",
        "--gpu=0,-1",
        "--epochs=-1",
        "--epochs=1.5",
        "--batch-size=0",
        "--batch-size=-8",
        "--batch-size=many",
        "--lr=0",
        "--lr=-0.1",
        "--lr=nan",
        "--lr=inf",
        "--lr=1e999",
        "--lr=fast",
        "--fanout=",
        "--fanout=0",
        "--fanout=10,-2",
        "--fanout=10,0,10",
        "--fanout=10,ten",
        "--num-workers=-1",
        "--gpu-cache-size=-1",
        "--gpu-cache-size=1000",
        "--seed=-1",
        "--speed=3",
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(monkeypatch, flag):
    machine(monkeypatch)
    assert flag.partition("=")[0] in refusal(monkeypatch, "--mode=cpu-cpu", flag)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gpu=3", ["--gpu", "3 GPUs"]),
        ("--gpu=0,7 --mode=cuda-cuda", ["--gpu", "3 GPUs"]),
        ("--mode=pinned-cuda --num-workers=1", ["--num-workers"]),
        ("--mode=cuda-cuda --num-workers=1", ["--num-workers"]),
        ("--mode=cuda-cuda --gpu-cache-size=1000", ["--gpu-cache-size", "cuda-cuda"]),
        ("--mode=gpu", ["--mode", "pinned-cuda"]),
    ],
)
def test_what_contradicts_the_mode_or_the_gpus_is_refused(monkeypatch, flags, words):
    machine(monkeypatch, gpus=3)
    line = refusal(monkeypatch, *flags.split())
    assert all(word in line for word in words)


@pytest.mark.parametrize("mode", ["cpu-cuda", "pinned-cuda", "cuda-cuda"])
@pytest.mark.parametrize("gpus, package", [(0, "torch"), (2, "dgl")])
def test_a_named_cuda_mode_never_falls_back(monkeypatch, capsys, mode, gpus, package):
    machine(monkeypatch, gpus, cuda_dgl=False)
    line = refusal(monkeypatch, f"--mode={mode}")
    assert f"--mode={mode}" in line
    assert package in line
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("gpus, package", [(0, "torch"), (2, "dgl")])
def test_the_default_mode_falls_back_with_one_line(monkeypatch, capsys, gpus, package):
    machine(monkeypatch, gpus, cuda_dgl=False)
    with pytest.raises(Loading):
        main(monkeypatch)
    (line,) = capsys.readouterr().out.splitlines()
    assert "cpu-cpu" in line
    assert package in line


def test_the_default_mode_uses_the_gpus_without_a_word(monkeypatch, capsys):
    machine(monkeypatch, gpus=2)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--gpu=1,0"])
    args = nc.parse_args()
    assert [str(device) for device in nc.settle_devices(args)] == ["cuda:1", "cuda:0"]
    assert args.mode == "pinned-cuda"
    assert capsys.readouterr().out == ""


@pytest.mark.skipif("+cu" in nc.dgl.__version__, reason="this DGL is built for CUDA")
def test_a_dgl_without_cuda_is_recognised(monkeypatch):
    recognise = nc.dgl._ffi.function.get_global_func
    machine(monkeypatch, gpus=1)
    monkeypatch.setattr(nc.dgl._ffi.function, "get_global_func", recognise)
    line = refusal(monkeypatch, "--mode=pinned-cuda")
    assert nc.dgl.__version__ in line
    assert "README" in line  # which says how to install the CUDA build


@pytest.mark.parametrize(
    "flags",
    [
        "--epochs=0",
        "--fanout=-1",
        "--gpu=5,3",
        "--num-workers=2",
        "--mode=cpu-cuda --num-workers=2",
        "--mode=cpu-cuda --gpu-cache-size=1000",
        "--mode=pinned-cuda --gpu-cache-size=1000",
    ],
)
def test_what_fits_together_is_not_refused(monkeypatch, flags):
    machine(monkeypatch, gpus=6)
    with pytest.raises(Loading):
        main(monkeypatch, *(["--mode=cpu-cpu"] + flags.split()))


def test_torchrun_with_too_few_ids_is_refused_in_one_line(monkeypatch):
    machine(monkeypatch)
    os.environ.update(LOCAL_WORLD_SIZE="3", LOCAL_RANK="0", RANK="0", WORLD_SIZE="3")
    line = refusal(monkeypatch, "--mode=cpu-cpu", "--gpu=0,1")
    assert "--gpu" in line
    assert "3" in line
    os.environ.update(LOCAL_RANK="1", RANK="1")
    with pytest.raises(SystemExit) as end:
        main(monkeypatch, "--mode=cpu-cpu", "--gpu=0,1")
    assert end.value.code == 1  # silent: rank 0 has said it


@pytest.mark.parametrize(
    "cores, gpus, threads", [(8, "0,1", "4"), (5, "0,1", "2"), (2, "0,1,2", "1")]
)
def test_the_usable_cores_are_shared_out(monkeypatch, cores, gpus, threads):
    machine(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    os.environ.pop("OMP_NUM_THREADS", None)
    with pytest.raises(Loading):
        main(monkeypatch, f"--gpu={gpus}")
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_a_number_of_threads_set_by_the_user_is_kept(monkeypatch):
    machine(monkeypatch)
    os.environ["OMP_NUM_THREADS"] = "37"
    with pytest.raises(Loading):
        main(monkeypatch)
    assert os.environ["OMP_NUM_THREADS"] == "37"


def test_without_torchrun_a_world_size_from_elsewhere_is_ignored(monkeypatch, capsys):
    machine(monkeypatch)
    os.environ.update(WORLD_SIZE="3", RANK="1")  # as some cluster managers set them
    started = []
    monkeypatch.setattr(nc, "load_dataset", lambda *_: None)
    monkeypatch.setattr(nc, "serve_store", lambda: argparse.Namespace(port=0))
    monkeypatch.setattr(
        nc.mp, "spawn", lambda run, args, nprocs: started.append(nprocs)
    )
    main(monkeypatch, "--gpu=0,1")
    assert started == [2]
    assert "Running on the CPU" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--gpu=0,0", "--mode=pinned-cuda"])
def test_the_user_reads_one_line_within_seconds(tmp_path, flag):
    start = time.monotonic()
    status, output, errors = run_script(flag, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert status != 0
    assert errors.count("\n") == 1
    assert flag.partition("=")[0] in errors
    assert "Traceback" not in output + errors
    assert not os.listdir(tmp_path)
    assert time.monotonic() - start < 30
