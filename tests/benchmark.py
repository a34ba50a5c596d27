"""Measure the training script beside a plain GraphBolt loop and DGL's older loader.

    python tests/benchmark.py                                  # all: an hour or two
    python tests/benchmark.py --parts=speed --ranks=2 --size=quarter
    python tests/benchmark.py --size=tiny --steps=2 --repeats=1  # does it still work?

All runs on the CPU, on a synthetic graph that is made once. Contestants take turns,
each in new processes, because allocator and threads are set per process. Ratios are
taken within a turn, so that a slow minute of the machine hits both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import inspect
import io
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import node_classification as script  # isort: skip  (first: it sets DGL up)

import dgl
import dgl.graphbolt as gb
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

if __name__ == "__mp_main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ranks end at once with Ctrl-C

NODES, EDGES, WIDTH, CLASSES = 2_449_029, 122_000_000, 100, 47  # ogbn-products
SIZES = {"tiny": 64, "sixteenth": 16, "quarter": 4, "full": 1}  # name: divisor
PARTS = ("speed", "levers", "step", "memory", "startup", "growth")
FANOUT = [10, 10, 10]
WARMUP, COOLDOWN = 3, 2  # steps before and after those that count
CORES = len(os.sched_getaffinity(0))

SCRIPT, PLAIN, OLDER = "this script", "plain GraphBolt loop", "older loader"
LEVERS = ("allocator", "threads", "feature reader", "renumbering")
LEVERS += ("no prefetch thread",)
EXCHANGE = "gradient exchange"
CONTESTANTS = {  # name: (pipeline, what it goes without)
    SCRIPT: ("script", ()),
    PLAIN: ("plain", ("allocator", "threads", "frozen imports")),
    f"{PLAIN}, same settings": ("plain", ()),
    OLDER: ("older", ("allocator", "threads", "frozen imports")),
    f"{OLDER}, same settings": ("older", ()),
    **{f"without: {lever}": ("script", (lever,)) for lever in LEVERS},
}
SECTIONS = ("sampling neighbours", "renumbering nodes", "fetching features")
SECTIONS += ("building blocks", "forward", "backward", EXCHANGE, "optimizer", "other")
SECTIONS += ("step",)


@dataclass
class Job:
    """One run of one contestant; it travels to the ranks."""

    pipeline: str
    without: tuple[str, ...]
    folder: Path
    ranks: int
    steps: int  # 0: epochs over all items, as a command of its own
    batch_size: int
    epochs: int = 1
    sections: bool = False
    results: Any = None  # a queue from the ranks


# In the ranks


MS: Counter[str] = Counter()  # by section of a step
STORE, SAMPLER = gb.impl.torch_based_feature_store, gb.impl.neighbor_sampler
SLOW = (  # what the script replaces, with the lever that it belongs to
    ("allocator", script.ctypes, "CDLL"),
    ("feature reader", STORE, "index_select"),
    ("renumbering", SAMPLER, "unique_and_compact_csc_formats"),
)


def timed(function: Callable, section: str) -> Callable:
    """Return `function` with its time charged to `section`, less what it calls."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start, before = time.perf_counter(), sum(MS.values())
        result = function(*args, **kwargs)
        called = sum(MS.values()) - before
        MS[section] += 1000 * (time.perf_counter() - start) - called
        return result

    return wrapper


def time_sections() -> None:
    """Charge what the script's step calls to sections."""
    for owner, method, section in (
        (gb.FusedCSCSamplingGraph, "sample_neighbors", "sampling neighbours"),
        (gb.TorchBasedFeature, "read", "fetching features"),
        (script.SAGE, "forward", "forward"),
        (torch.Tensor, "backward", "backward"),
        (torch.optim.Adam, "step", "optimizer"),
    ):
        setattr(owner, method, timed(getattr(owner, method), section))
    gb.MiniBatch.blocks = property(timed(gb.MiniBatch.blocks.fget, "building blocks"))


class Stopwatch:
    """Pass a dataloader's batches on and time the steps that count.

    They begin and end in mid-epoch: at an epoch's start a prefetching loader has
    prepared nothing, at its end it has nothing left to prepare.
    """

    def __init__(self, loader: Any, job: Job, is_train: bool) -> None:
        self.loader, self.job = loader, job
        self.phase = "training" if is_train else "evaluation"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator:
        job, nodes, batches = self.job, [], iter(self.loader)
        following = timed(lambda: next(batches, None), "renumbering nodes")  # the rest
        while batch := following():
            older = isinstance(batch, tuple)
            nodes.append(len(batch[0] if older else batch.node_features["feat"]))
            yield batch
            if len(nodes) == WARMUP:
                MS.clear()
                start = time.perf_counter()
            elif job.steps and len(nodes) == WARMUP + job.steps:
                step = 1000 * (time.perf_counter() - start) / job.steps
                found = {section: ms / job.steps for section, ms in MS.items()}
                found["other"] = step - sum(found.values())
                found |= {"step": step, "nodes": sum(nodes[WARMUP:]) / job.steps}
                found["ms/node"] = step / found["nodes"]
                # Added up over the ranks, the rest are means and this is a sum.
                found = {name: value / job.ranks for name, value in found.items()}
                found["seeds/s"] = 1000 * job.batch_size / step
                job.results.put({f"{self.phase} {k}": v for k, v in found.items()})


def quiet() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    return stack


def script_rank(job: Job, rank: int, *args, run=script.run) -> None:
    """Be a rank of the script, with its dataloaders watched and levers off."""
    create, loader = script.create_dataloader, gb.DataLoader

    def watched(*args, **kwargs) -> Stopwatch | None:
        made, is_train = create(*args, **kwargs), kwargs.get("is_train", args[-1])
        return None if made is None else Stopwatch(made, job, is_train)

    def with_thread(datapipe, **kwargs) -> gb.DataLoader:
        return loader(datapipe.copy_to(torch.device("cpu")), **kwargs)

    def without_exchange(model, *args) -> torch.Tensor:
        with model.no_sync():
            return forward(model, *args)

    script.create_dataloader = watched
    script.speed_up_cpu = partial(speed_up_cpu, job.without)
    if "no prefetch thread" in job.without:
        gb.DataLoader = functools.wraps(loader)(with_thread)
    if EXCHANGE in job.without:
        forward, DDP.forward = DDP.forward, without_exchange
    if job.sections:
        time_sections()
    with quiet():
        run(rank, *args)


def speed_up_cpu(without, num_nodes: int, speed_up=script.speed_up_cpu) -> None:
    """Do what the script does for the CPU, without some of the levers."""
    with contextlib.ExitStack() as stack:
        for lever, module, name in SLOW:
            if lever in without:
                stack.enter_context(mock.patch.object(module, name))
        speed_up(num_nodes)


def peer_loader(job: Job, dataset: SimpleNamespace, items, is_train: bool):
    """Return the dataloader of DGL's multi-GPU example, with all of it on the CPU.

    The older loader was in the same example before GraphBolt.
    """
    options = {"shuffle": is_train, "drop_last": is_train, "batch_size": job.batch_size}
    if job.pipeline == "plain":
        pipe = gb.DistributedItemSampler(items, drop_uneven_inputs=is_train, **options)
        pipe = pipe.sample_neighbor(dataset.graph, FANOUT)
        pipe = pipe.fetch_feature(dataset.feature, node_feature_keys=["feat"])
        return gb.DataLoader(pipe.copy_to(torch.device("cpu")), num_workers=0)
    graph = dgl.graph(("csc", (*dataset.csc, [])), num_nodes=dataset.graph.num_nodes)
    graph.ndata["feat"] = dataset.feature.read("node", None, "feat")
    seeds, labels = items[:]
    graph.ndata["label"] = labels.new_zeros(graph.num_nodes())
    graph.ndata["label"][seeds.long()] = labels
    names = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]}
    sampler = dgl.dataloading.NeighborSampler(FANOUT, **names)
    return dgl.dataloading.DataLoader(
        graph, seeds.long(), sampler, use_ddp=True, **options
    )


def unpack(batch: Any) -> tuple:
    """Return blocks, features and labels of either loader's batch."""
    if isinstance(batch, tuple):
        blocks = batch[2]
        return blocks, blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
    return batch.blocks, batch.node_features["feat"], batch.labels


def peer_rank(rank: int, job: Job, dataset: SimpleNamespace, store: str) -> None:
    """Be a rank of the loop that DGL's examples have around either loader."""
    if "frozen imports" in job.without:
        gc.unfreeze()
    if "allocator" not in job.without:
        speed_up_cpu(("feature reader", "renumbering"), 0)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=job.ranks)
    task, feature = dataset.tasks[0], dataset.feature
    train, valid, test = (
        items and Stopwatch(peer_loader(job, dataset, items, is_train), job, is_train)
        for items, is_train in (
            (task.train_set, True),
            (task.validation_set, False),
            (task.test_set, False),
        )
    )
    width, classes = feature.size("node", None, "feat")[0], task.metadata["num_classes"]
    torch.manual_seed(0)
    model = DDP(script.SAGE(width, 256, classes, len(FANOUT)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with quiet() if job.steps else contextlib.nullcontext():
        for epoch in range(job.epochs):
            start = time.perf_counter()
            model.train()
            loss_sum, seeds = torch.tensor(0.0), torch.tensor(0)
            with Join([model]):
                for batch in train:
                    blocks, features, labels = unpack(batch)
                    logits = model(blocks, features)
                    loss = torch.nn.functional.cross_entropy(logits, labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    loss_sum += loss.detach() * len(labels)
                    seeds += len(labels)
            loss = script.weighted_reduce(loss_sum, seeds)
            accuracy = valid and evaluate(model.module, valid, classes)
            if rank == 0:
                seconds = time.perf_counter() - start
                print(f"Epoch {epoch:05d} | {loss} | {accuracy} | Time {seconds:.4f}")
                sys.stdout.flush()
        accuracy = evaluate(model.module, test, classes)
        if rank == 0:
            print(f"Test Accuracy {accuracy:.4f}")
    # gloo's threads may yet need Python's lock to free what they reduced. Leaving the
    # group waits for them, with that lock released only if this object dies last.
    last = dist.group.WORLD._get_backend(torch.device("cpu"))  # noqa: F841
    del model
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Any, classes: int) -> torch.Tensor:
    """Return the accuracy over all ranks, on rank 0."""
    import torchmetrics.functional as MF

    model.eval()
    logits, labels = [], []
    for batch in loader:
        blocks, features, batch_labels = unpack(batch)
        logits.append(model(blocks, features))
        labels.append(batch_labels)
    logits, labels = torch.cat(logits), torch.cat(labels)
    accuracy = MF.accuracy(logits, labels, "multiclass", num_classes=classes)
    items = torch.tensor(float(len(labels)))
    return script.weighted_reduce(accuracy * items, items)


# In the parent


def make_dataset(folder: Path, divisor: int) -> None:
    """Write and preprocess a graph; an interrupted run leaves no half one."""
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    if not folder.exists():
        nodes = (
            NODES // CLASSES // divisor * CLASSES
        )  # write_synthetic wants a multiple
        script.write_synthetic(scratch, nodes, EDGES // divisor, WIDTH, CLASSES)
        with quiet():
            gb.OnDiskDataset(str(scratch))
        for raw in scratch.glob("*.npy"):  # up to 3 GB that are not read again
            raw.unlink()
        scratch.rename(folder)


@functools.cache
def load(folder: Path) -> gb.OnDiskDataset:
    """Load a dataset once; it moves to shared memory when the first ranks start."""
    with quiet():
        return gb.OnDiskDataset(str(folder), force_preprocess=False).load()


@functools.cache
def long_csc(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the graph in int64, DGL's default, for the older loader.

    With int32, GraphBolt's choice, that of DGL 2.1 crashes when it has two threads.
    """
    graph = load(folder).graph
    return graph.csc_indptr.long(), graph.indices.long()


def select(dataset: gb.OnDiskDataset, job: Job) -> SimpleNamespace:
    """Return what ranks need of a dataset, with as many items as the job takes.

    Few items lower job.steps. The seeds' field is named as in DGL's own datasets: with
    the other name copy_to of DGL 2.1 builds blocks once more, and slows the plain loop.
    """
    task = dataset.tasks[0]
    train, valid, test = task.train_set[:], task.validation_set[:], task.test_set[:]
    if job.steps:
        test, valid = tuple(map(torch.cat, zip(valid, test))), None
        share = job.batch_size * job.ranks
        most = min(len(train[0]), len(test[0])) // share - WARMUP - COOLDOWN
        if most < 1:
            sys.exit("error: too few items for this --batch-size and --ranks")
        job.steps = min(job.steps, most)
        count = share * (WARMUP + job.steps + COOLDOWN)
        train, test = (tuple(x[:count].clone() for x in s) for s in (train, test))
    old = "extra_attrs" in inspect.signature(gb.CopyTo).parameters
    names = ("seed_nodes" if old else "seeds", "labels")
    train, valid, test = (
        items and gb.ItemSet(items, names) for items in (train, valid, test)
    )
    sets = {"train_set": train, "validation_set": valid, "test_set": test}
    task = SimpleNamespace(metadata=task.metadata, **sets)
    return SimpleNamespace(graph=dataset.graph, feature=dataset.feature, tasks=[task])


def measure(job: Job, fresh: bool = False) -> dict:
    """Run a contestant in new processes; return its ranks' results, taken together."""
    job = replace(job, results=mp.get_context("spawn").SimpleQueue())
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        if "threads" in job.without:
            os.environ["OMP_NUM_THREADS"] = str(max(1, CORES // 2 // job.ranks))
        if job.pipeline == "script":
            run_script(job, fresh)
        else:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // job.ranks)))
            dataset = select(load(job.folder), job)
            if job.pipeline == "older":
                dataset.csc = long_csc(job.folder)
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(peer_rank, (job, dataset, f"{folder}/store"), job.ranks)
    results: Counter[str] = Counter(steps=job.steps)
    for _ in range(2 * job.ranks if job.steps else 0):
        results.update(job.results.get())
    return dict(results)


def measure_step(job: Job) -> list[dict]:
    """Return the sections of a training step; waiting for others is in the exchange."""
    found = measure(job)
    if job.ranks > 1:
        alone = measure(replace(job, without=(EXCHANGE,)))["training backward"]
        found[f"training {EXCHANGE}"] = found["training backward"] - alone
        found["training backward"] = alone
    ms = {name: found.get(f"training {name}", 0.0) for name in SECTIONS}
    return [
        {"contestant": name, "share": value / ms["step"], "ms": value}
        for name, value in ms.items()
    ]


def run_script(job: Job, fresh: bool) -> None:
    """Run the script's main(), with our items and watched ranks."""
    script_load, opened = script.load_dataset, gb.OnDiskDataset

    def load_dataset(*args) -> SimpleNamespace:
        return select(script_load(*args) if fresh else load(job.folder), job)

    def open_dataset(path: str, **_) -> gb.OnDiskDataset:
        return opened(path, force_preprocess=False)

    gpus = ",".join(map(str, range(job.ranks)))
    argv = f"- --gpu={gpus} --mode=cpu-cpu --epochs=1 --batch-size={job.batch_size}"
    run = partial(script_rank, job)
    with (
        mock.patch.object(sys, "argv", [*argv.split(), f"--dataset={job.folder}"]),
        mock.patch.object(gb, "OnDiskDataset", open_dataset),
        mock.patch.multiple(script, load_dataset=load_dataset, run=run),
    ):
        script.main()


def own_command(args: argparse.Namespace, contestant: str, **options) -> list[str]:
    """Return the command line that runs one contestant and nothing else."""
    options = {"one": contestant, "batch-size": args.batch_size, **options}
    return [__file__, *(f"--{name}={value}" for name, value in options.items())]


@contextlib.contextmanager
def started(line: list[str], folder: Path | None) -> Iterator[subprocess.Popen]:
    """Start a Python command that ends with this context, whatever ends that."""
    line = [sys.executable, *line]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        yield child
        if child.wait():
            sys.exit(f"error: {' '.join(line)}: exit status {child.returncode}")
    finally:
        child.kill()  # its ranks get a signal of their own then
        child.wait()
        signal.signal(signal.SIGTERM, before)


def measure_memory(line: list[str]) -> dict:
    """Return peaks in GiB of proportional set size: shared pages count once."""
    peaks: Counter[str] = Counter()
    with started(line, None) as child:
        parent = psutil.Process(child.pid)
        while child.poll() is None:
            with contextlib.suppress(psutil.Error):  # one has just ended
                ranks = sorted(parent.children(), key=lambda process: process.pid)
                ranks = [p for p in ranks if "--multiprocessing-fork" in p.cmdline()]
                sizes = [p.memory_full_info().pss / 2**30 for p in (parent, *ranks)]
                names = ["parent", *(f"rank {i}" for i in range(len(ranks)))]
                peaks |= Counter({"all": sum(sizes), **dict(zip(names, sizes))})
            time.sleep(0.2)
    return dict(peaks)


def measure_startup(line: list[str], folder: Path) -> dict:
    """Return seconds from a command to its first training step and to its end.

    An epoch's line comes its own Time after the epoch's first step began.
    """
    start, first = time.perf_counter(), None
    with started(line, folder) as child:
        for text in child.stdout:
            if found := re.match(r"Epoch 0+ .*?\| Time ([\d.]+)", text):
                first = time.perf_counter() - start - float(found[1])
    return {"first step": first, "whole": time.perf_counter() - start}


def plan(args: argparse.Namespace, scratch: Path) -> Iterator[tuple[dict, Callable]]:
    """Yield each run's labels and what does it; contestants take turns."""
    parts, batch_size = args.parts, args.batch_size
    folders = {size: args.folder.resolve() / f"benchmark-{size}" for size in SIZES}
    for size in args.sizes if "growth" in parts else [args.size]:
        make = partial(make_dataset, folders[size], SIZES[size])
        yield {"part": "making", "contestant": size}, make
    smoke = [script.__file__, "--dataset=synthetic"]
    if "startup" in parts:  # once in vain: it makes the dataset
        make = partial(measure_startup, [*smoke, "--epochs=0"], scratch)
        yield {"part": "making", "contestant": "synthetic"}, make

    def job(name: str, size: str = args.size) -> Job:
        return Job(*CONTESTANTS[name], folders[size], ranks, args.steps, batch_size)

    for repeat, ranks in itertools.product(range(args.repeats), args.ranks):
        turns = {("speed", n): partial(measure, job(n)) for n in args.contestants}
        turns["step", ""] = partial(measure_step, replace(job(SCRIPT), sections=True))
        for size in args.sizes:
            turns["growth", size] = partial(measure, job(SCRIPT, size))
        options = {"ranks": ranks, "steps": args.steps, "dataset": folders[args.size]}
        for name in (SCRIPT, PLAIN):
            line = own_command(args, name, **options)
            turns["memory", name] = partial(measure_memory, line)
        if ranks == max(args.ranks):
            gpus = f"--gpu={','.join(map(str, range(ranks)))}"
            epochs = f"--epochs={args.epochs}"
            line = [*smoke, gpus, epochs, f"--batch-size={batch_size}"]
            turns["startup", SCRIPT] = partial(measure_startup, line, scratch)
            options |= {"steps": 0, "dataset": "datasets/synthetic"}
            line = [*own_command(args, PLAIN, **options), epochs]
            turns["startup", PLAIN] = partial(measure_startup, line, scratch)
        for (part, name), run in turns.items():
            labels = {"part": part, "contestant": name, "ranks": ranks}
            if part in parts or (part == "speed" and "levers" in parts):
                yield labels | {"repeat": repeat}, run


# Tables


def print_tables(runs: list[dict], sizes: list[str]) -> None:
    """Print Markdown: medians, with the range over the repeats."""

    def values(contestant: str, field: str) -> list[float]:
        labels = {"part": part, "ranks": ranks, "contestant": contestant}
        return [run[field] for run in runs if labels.items() <= run.items()]

    def column(row: str, field: str, over: str = "", under: str = "") -> list[float]:
        """Return the row's values, or their ratios over or under another row's."""
        if not over and not under:
            return values(row, field)
        pairs = zip(values(over or row, field), values(under or row, field))
        return [a / b for a, b in pairs]

    def show(values: list[float]) -> str:
        ends = min(values), statistics.median(values), max(values)
        digits = 0 if ends[1] >= 100 else 1 if ends[1] >= 10 else 2
        low, middle, high = (f"{x:,.{digits}f}" for x in ends)
        return middle if low == high else f"{middle} ({low}–{high})"

    tables = {
        "speed": [
            ("training: script ÷ this", "training seeds/s", SCRIPT),
            ("this ÷ plain", "training seeds/s", "", PLAIN),
            ("seeds/s", "training seeds/s"),
            ("evaluation: script ÷ this", "evaluation seeds/s", SCRIPT),
            ("this ÷ plain", "evaluation seeds/s", "", PLAIN),
            ("seeds/s", "evaluation seeds/s"),
        ],
        "step": [("share", "share"), ("ms", "ms")],
        "memory": [
            ("all: this ÷ plain", "all", "", PLAIN),
            *((f"{name}, GiB", name) for name in ("all", "parent", "rank 0")),
        ],
        "startup": [
            ("first step: plain ÷ this", "first step", PLAIN),
            ("s", "first step"),
            ("whole command: plain ÷ this", "whole", PLAIN),
            ("s", "whole"),
        ],
        "growth": [
            (f"time ÷ nodes, {sizes[0]} = 1", "training ms/node", "", sizes[0]),
            ("ms a step", "training step"),
            ("sampled nodes", "training nodes"),
        ],
    }
    for part, ranks in dict.fromkeys((run["part"], run["ranks"]) for run in runs):
        head = [f"{part}, {ranks} rank{'s' * (ranks > 1)}"]
        head += [title for title, *_ in tables[part]]
        print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        labels = {"part": part, "ranks": ranks}
        rows = [run["contestant"] for run in runs if labels.items() <= run.items()]
        for row in dict.fromkeys(rows):
            cells = [row, *(show(column(row, *spec)) for _, *spec in tables[part])]
            print(f"| {' | '.join(cells)} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, hidden = parser.add_argument, argparse.SUPPRESS

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    add("--size", choices=SIZES, default="full", help="full: ogbn-products'")
    add("--parts", default=",".join(PARTS), help="comma-separated")
    add("--ranks", default="1,2", type=numbers, help="numbers of processes")
    add("--repeats", default=5, type=int, help="turns of each contestant")
    add("--steps", default=12, type=int, help="steps that count, per turn and phase")
    add("--batch-size", default=1024, type=int, help="seed nodes per rank and step")
    add("--epochs", default=10, type=int, help="epochs of part startup's commands")
    add("--folder", default="datasets", type=Path, help="where graphs are kept")
    add("--json", default="benchmark.json", type=Path, help="file for all figures")
    # The commands that this one starts: one contestant on one dataset.
    add("--one", choices=CONTESTANTS, help=hidden)
    add("--dataset", type=Path, help=hidden)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--parts: choose from {', '.join(PARTS)}")
    args.sizes = list(SIZES)[1 : list(SIZES).index(args.size) + 1] or ["tiny"]
    peers, levers = list(CONTESTANTS)[:5], list(CONTESTANTS)[5:]
    args.contestants = peers if "speed" in args.parts else peers[:2]
    args.contestants += levers if "levers" in args.parts else []
    return args


def main() -> None:
    args = parse_args()
    mp.set_sharing_strategy("file_system")
    for name in [n for n in os.environ if n.startswith(("OMP_", "MALLOC_"))]:
        del os.environ[name]  # contestants set them, or have none
    if args.one:
        if "frozen imports" in CONTESTANTS[args.one][1]:
            gc.unfreeze()
        job = Job(*CONTESTANTS[args.one], args.dataset, args.ranks[0], args.steps, 0)
        job.batch_size, job.epochs = args.batch_size, 1 if args.steps else args.epochs
        measure(job, fresh=True)
        return
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    about = {
        "date": datetime.datetime.now().astimezone().date().isoformat(),
        "processor": processor[1] if processor else platform.machine(),
        "cores": CORES,
        "torch": torch.__version__,
        "dgl": dgl.__version__,
        "python": platform.python_version(),
    }
    options = {name: str(value) for name, value in vars(args).items()}
    args.folder.mkdir(parents=True, exist_ok=True)
    runs: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        bar = tqdm(list(plan(args, Path(scratch))))
        for labels, run in bar:
            bar.set_description(f"{labels['part']}: {labels['contestant']}")
            results = run()
            if labels["part"] == "making":
                continue
            for result in results if isinstance(results, list) else [results]:
                runs.append(labels | result)
            found = {"about": about, "options": options, "runs": runs}
            args.json.write_text(json.dumps(found, indent=1))
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print_tables(runs, args.sizes)


if __name__ == "__main__":
    main()
