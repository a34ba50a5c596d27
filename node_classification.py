"""Train GraphSAGE for node classification on several GPUs with DGL GraphBolt.

One process (rank) per GPU: GraphBolt samples and loads the mini-batches, PyTorch
DistributedDataParallel (DDP) keeps the replicas of the model equal.

    main ── parse and check the arguments
         ── load_dataset, once per machine, before any rank starts
         ── one run() per device: mp.spawn, or this process if torchrun started it
              run(rank, world_size, args, devices, dataset)
               ├─ device, process group (NCCL on GPUs, gloo on the CPU)
               ├─ graph and features to their storage (pinned | cuda | cpu), GPU cache
               ├─ SAGE → DDP; train / validation / test dataloaders
               ├─ train(): epochs under Join, evaluate() and weighted_reduce()
               ├─ evaluate() on the test set, weighted_reduce()
               └─ leave the process group

Launch lines; README.md says what each needs:

    python node_classification.py --gpu=0,1 --dataset=synthetic --mode=cpu-cpu
    python node_classification.py --gpu=0
    python node_classification.py --gpu=0,1,2,3
    torchrun --standalone --nproc-per-node=2 node_classification.py

[distributed] marks the steps that are there only because there are several ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import inspect
import io
import math
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from importlib import metadata
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Callable, NoReturn

if __name__ in ("__main__", "__mp_main__"):
    # Ctrl-C ends the parent and its ranks at once, even inside an import or a
    # collective, where Python would not get to raise KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL prints a banner
warnings.filterwarnings("ignore", module=r"(dgl|torch|torchdata)\b")
try:
    import dgl
    import dgl.graphbolt as gb
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import torch.nn as nn
    import torch.nn.functional as F
    import yaml
    from dgl._ffi.function import get_global_func
    from dgl.nn import SAGEConv
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    metadata.version("torchmetrics")  # imported in evaluate(), by the ranks alone
    torch.from_numpy(np.zeros(1))  # fails where numpy 2 meets an older torch
except Exception as error:
    # The libraries' own errors name neither what is installed nor what would fit.
    wanted = (
        "torch dgl torchdata numpy pandas pydantic pyyaml torchmetrics tqdm".split()
    )
    found = {(d.name or "").lower(): d.version for d in metadata.distributions()}
    for name in ("torch", "dgl"):
        found[name] = getattr(sys.modules.get(name), "__version__", found.get(name))
    installed = ", ".join(f"{name} {found.get(name) or 'missing'}" for name in wanted)
    sys.exit(
        "error: the installed packages do not fit each other "
        f"({type(error).__name__}: {error}).\n"
        f"  installed: {installed}\n"
        "  fits: torch 2.2.1, dgl 2.1.0, torchdata 0.7.1, numpy below 2, pandas, "
        "pydantic, pyyaml, torchmetrics, tqdm (README.md: other pairs, CUDA builds)\n"
        "  run: pip install -r requirements.txt"
    )

DATASETS = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "synthetic")
SETS = ("train_set", "validation_set", "test_set")


# ---- Model


class SAGE(nn.Module):
    """GraphSAGE with the mean aggregator (Hamilton et al., arXiv:1706.02216).

    ReLU and Dropout(0.5) stand between layers; the last layer gives the logits.
    """

    def __init__(
        self, in_size: int, hidden_size: int, out_size: int, num_layers: int = 3
    ) -> None:
        super().__init__()
        self.sizes = [in_size] + [hidden_size] * (num_layers - 1) + [out_size]
        self.layers = nn.ModuleList(
            SAGEConv(source, target, "mean")
            for source, target in zip(self.sizes, self.sizes[1:])
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: list[dgl.DGLGraph], x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (seed nodes, out_size).

        `blocks` holds one bipartite graph a layer, outermost first; `x` is float,
        shape (source nodes of blocks[0], in_size).
        """
        for layer, block in zip(self.layers, blocks):
            x = layer(block, x)
            if layer is not self.layers[-1]:
                x = self.dropout(F.relu(x))
        return x


def create_dataloader(
    args: argparse.Namespace,
    graph: gb.FusedCSCSamplingGraph,
    features: gb.FeatureStore,
    itemset: gb.ItemSet,
    device: torch.device,
    is_train: bool,
) -> gb.DataLoader:
    """Chain the stages that turn this rank's share of `itemset` into mini-batches.

    A mini-batch has `labels` and `blocks`, and in `node_features["feat"]` a row for
    each source node of the first block. The process group must be there already.
    """
    storage = args.mode.split("-")[0]

    # [distributed] Each replica gets its own part of the items. Training drops what
    # would leave replicas with unequal batches; evaluation must see every item once.
    datapipe = sampler = gb.DistributedItemSampler(
        itemset,
        batch_size=args.batch_size,
        shuffle=is_train,
        drop_last=is_train,
        drop_uneven_inputs=is_train,
        **supported(gb.DistributedItemSampler, seed=args.seed),
    )
    if hasattr(sampler, "_rng"):  # DGL 2.1 and 2.2 take no seed
        sampler._rng = TorchSeeded(np.random.PCG64())

    # Where the graph is in reach of the GPU, sampling runs there: seeds go first.
    if storage != "cpu":
        seed_field = itemset.names[0]
        datapipe = datapipe.copy_to(
            device, **supported(gb.CopyTo, extra_attrs=[seed_field])
        )
    datapipe = datapipe.sample_neighbor(
        graph,
        args.fanout,
        **supported(
            gb.NeighborSampler,
            overlap_fetch=storage == "pinned",
            asynchronous=storage != "cpu",
        ),
    )
    # The GPU cache of a graph kept in CPU memory looks nodes up on the GPU.
    if storage == "cpu" and args.gpu_cache_size > 0:
        datapipe = datapipe.copy_to(
            device, **supported(gb.CopyTo, extra_attrs=["input_nodes"])
        )
    datapipe = datapipe.fetch_feature(features, node_feature_keys=["feat"])
    # For CPU storage the finished mini-batch is what moves. With no GPU to move it to
    # the stage is left out: its prefetching thread takes cores from the training.
    if storage == "cpu" and device.type != "cpu":
        datapipe = datapipe.copy_to(device)

    dataloader = gb.DataLoader(
        datapipe,
        num_workers=args.num_workers,
        **supported(gb.DataLoader, overlap_graph_fetch=storage == "pinned"),
    )
    steps, replicas = len(itemset) / args.batch_size, dist.get_world_size()
    dataloader.num_batches = (  # rank 0's, for its progress bar
        int(steps // replicas) if is_train else math.ceil(math.ceil(steps) / replicas)
    )
    return dataloader


def weighted_reduce(
    tensor: torch.Tensor, weight: torch.Tensor, dst: int = 0
) -> torch.Tensor:
    """Sum `tensor` and `weight` onto rank `dst`, in place, and return the quotient.

    With `tensor` a rank's sum over its items and `weight` the number of the items,
    the quotient is the exact mean over all ranks, however unequal their shares; a
    mean of the ranks' means would not be. On other ranks it is meaningless.
    """
    dist.reduce(tensor, dst=dst)
    dist.reduce(weight, dst=dst)
    return tensor / weight


@torch.no_grad()
def evaluate(
    rank: int,
    model: nn.Module,
    dataloader: gb.DataLoader,
    num_classes: int,
    device: torch.device,
    phase: str = "evaluate",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's accuracy (float64) and its number of items (int64).

    `model` is the bare module: ranks may have unequal numbers of batches, or none,
    and DDP's forward would wait for its peers.
    """
    import torchmetrics.functional as MF  # 0.7 s that the parent need not spend

    model.eval()
    predicted, labels = [], []
    for data in progress_bar(dataloader, rank, phase):
        logits = model(data.blocks, data.node_features["feat"].float())
        predicted.append(logits.argmax(dim=1))  # class ids: logits would fill memory
        labels.append(data.labels.long().flatten())
    num_items = torch.tensor(sum(map(len, labels)), device=device)
    if num_items == 0:  # more ranks than batches
        return torch.zeros((), dtype=torch.float64, device=device), num_items
    accuracy = MF.accuracy(
        torch.cat(predicted),
        torch.cat(labels),
        task="multiclass",
        num_classes=num_classes,
    )
    return accuracy.double(), num_items


def global_accuracy(rank, model, dataloader, num_classes, device, phase) -> float:
    """Return the accuracy over all ranks; meaningless on ranks other than 0."""
    accuracy, num_items = evaluate(rank, model, dataloader, num_classes, device, phase)
    # [distributed] Counts travel, not means; rounding undoes the float32 division.
    return weighted_reduce((accuracy * num_items).round(), num_items).item()


def train(
    rank: int,
    args: argparse.Namespace,
    train_dataloader: gb.DataLoader,
    valid_dataloader: gb.DataLoader | None,
    num_classes: int,
    model: DistributedDataParallel,
    device: torch.device,
) -> None:
    """Train for `args.epochs` epochs; rank 0 prints a line for each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    first_epoch = resume(rank, args, model.module, optimizer) if args.snapshot else 0
    for epoch in range(first_epoch, args.epochs):
        seed_rank(args.seed, epoch, rank)
        start = clock(device)
        model.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_seeds = torch.zeros((), dtype=torch.int64, device=device)
        # [distributed] Join lets a rank that runs out of batches answer the gradient
        # exchange of those still training, where plain DDP would wait for ever.
        with Join([model]):
            for data in progress_bar(train_dataloader, rank, f"Epoch {epoch} train"):
                labels = data.labels.long().flatten()
                logits = model(data.blocks, data.node_features["feat"].float())
                loss = F.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()  # [distributed] averages the ranks' gradients
                optimizer.step()
                loss_sum += loss.detach() * len(labels)
                num_seeds += len(labels)
        train_time = clock(device) - start
        mean_loss = weighted_reduce(loss_sum, num_seeds).item()
        accuracy = "none"
        if valid_dataloader is not None:
            accuracy = global_accuracy(
                rank,
                model.module,
                valid_dataloader,
                num_classes,
                device,
                f"Epoch {epoch} validate",
            )
            accuracy = f"{accuracy:.4f}"
        if rank == 0:
            print(
                f"Epoch {epoch:05d} | Average Loss {mean_loss:.4f} | "
                f"Accuracy {accuracy} | Time {clock(device) - start:.4f} | "
                f"Train Time {train_time:.4f} | "
                f"Seed Nodes/s {num_seeds.item() / train_time:.0f}",
                flush=True,
            )
            if args.snapshot:
                save_snapshot(args, epoch + 1, model.module, optimizer)


def run(
    rank: int,
    world_size: int,
    args: argparse.Namespace,
    devices: list[torch.device],
    dataset: gb.OnDiskDataset,
    store: dist.Store | None = None,
) -> None:
    """Be rank `rank` of `world_size`: join the group, train, test, leave."""
    device = devices[int(os.environ.get("LOCAL_RANK", rank))]
    storage = args.mode.split("-")[0]
    keep_freed_memory()

    # [distributed] Choose the GPU first: NCCL and GraphBolt use the current one.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store or parent_store(), rank=rank, world_size=world_size
    )

    # Pinned CPU memory can be read by the GPU; every rank pins the one shared copy.
    graph = dataset.graph
    feature = gb.TorchBasedFeature(dataset.feature.read("node", None, "feat"))
    if storage == "pinned":
        graph.pin_memory_()
        feature.pin_memory_()
    elif storage == "cuda":
        graph, feature = graph.to(device), feature.to(device)
    else:
        feature = CPUFeature(feature.read())
    in_size = feature.size()[0]
    if args.gpu_cache_size > 0:
        feature = gpu_cached(feature, args.gpu_cache_size)
    features = gb.BasicFeatureStore({("node", None, "feat"): feature})

    task = dataset.tasks[0]
    num_classes = task.metadata["num_classes"]
    torch.manual_seed(args.seed)  # the same model in every rank
    model = SAGE(in_size, 256, num_classes, len(args.fanout)).to(device)
    # [distributed] From here on, backward() averages gradients over the ranks.
    model = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None
    )
    train_dataloader, valid_dataloader, test_dataloader = (
        create_dataloader(args, graph, features, itemset, device, is_train)
        if itemset
        else None
        for itemset, is_train in (
            (task.train_set, True),
            (task.validation_set, False),
            (task.test_set, False),
        )
    )

    if rank == 0:
        print_facts(args, devices, world_size, backend, dataset, in_size)
    train(rank, args, train_dataloader, valid_dataloader, num_classes, model, device)
    if test_dataloader is not None:
        seed_rank(args.seed, args.epochs, rank)
        accuracy = global_accuracy(
            rank, model.module, test_dataloader, num_classes, device, "Test"
        )
        if rank == 0:
            print(f"Test Accuracy {accuracy:.4f}", flush=True)

    # [distributed] gloo's thread may still need Python's lock to free the last
    # reduce, while destroying the group holds that lock and waits for the thread.
    # The barrier gives the lock away long enough, and ends the ranks together.
    dist.barrier()
    dist.destroy_process_group()


# The story ends here. What follows are its helpers, datasets, checks, command line.


def supported(function, **kwargs) -> dict:
    """Keep the keyword arguments that the installed DGL knows, drop the others.

    The script is written to DGL 2.4; an older release lacks some of its arguments, a
    newer one no longer has or needs some of 2.1's.
    """
    known = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in known}


class TorchSeeded(np.random.Generator):
    """Generator for the item sampler of DGL before 2.3, which takes no seed.

    The sampler draws the seed of each epoch's order from it; taken from torch's own
    generator, that seed repeats with seed_rank().
    """

    def integers(self, low: int, high: int) -> int:
        return torch.randint(low, high, ()).item()


class CPUFeature(gb.Feature):
    """Feature rows of a CPU tensor, shape (nodes, width).

    It reads with torch.index_select, 3 times as fast as DGL 2.1's own reader on the
    CPU, and takes ids from the GPU too, as a cache in front of it sends them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.tensor if ids is None else self.tensor.index_select(0, ids.cpu())

    def size(self) -> torch.Size:
        return self.tensor.size()[1:]


def gpu_cached(feature: gb.Feature, num_bytes: int) -> gb.Feature:
    """Put a cache of `num_bytes` of GPU memory before `feature`."""
    if hasattr(gb, "gpu_cached_feature"):
        return gb.gpu_cached_feature(feature, num_bytes)
    if "cache_size" in inspect.signature(gb.GPUCachedFeature).parameters:
        # DGL 2.1 counts in rows.
        row = feature.read(torch.tensor([0]))
        num_bytes = max(1, num_bytes // (row.numel() * row.element_size()))
    return gb.GPUCachedFeature(feature, num_bytes)


def seed_rank(seed: int, epoch: int, rank: int) -> None:
    """Give this epoch of this rank its own dropout, order and neighbours.

    Seeding anew for every epoch lets a resumed run repeat an uninterrupted one.
    """
    stream = (seed * 10_000 + epoch) * 10_000 + rank
    torch.manual_seed(stream)
    gb.seed(stream)


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def progress_bar(dataloader: gb.DataLoader, rank: int, phase: str) -> tqdm:
    """Wrap a dataloader in a bar that shows on rank 0 and in a terminal only."""
    return tqdm(
        dataloader,
        desc=phase,
        total=dataloader.num_batches,
        disable=None if rank == 0 else True,
        leave=False,
    )


def print_facts(args, devices, world_size, backend, dataset, in_size) -> None:
    """Say what is about to be trained, on what."""
    graph, task = dataset.graph, dataset.tasks[0]
    sizes = (task.train_set, task.validation_set, task.test_set)
    train, valid, test = (f"{len(s or ()):,}" for s in sizes)
    print(
        f"Processes: {world_size}\n"
        f"Devices: {', '.join(map(str, devices))}\n"
        f"Backend: {backend}\n"
        f"Mode: {args.mode}\n"
        f"Dataset: {dataset.dataset_name or args.dataset}\n"
        f"Nodes: {graph.num_nodes:,}\n"
        f"Edges: {graph.num_edges:,}\n"
        f"Feature width: {in_size}\n"
        f"Classes: {task.metadata['num_classes']}\n"
        f"Split: {train} train, {valid} validation, {test} test",
        flush=True,
    )


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors for the next mini-batch.

    By default it returns large blocks to the kernel at once, and on the CPU most of a
    step goes into page faults on fresh memory (README.md, Results). The numbers are
    M_TRIM_THRESHOLD, M_MMAP_MAX and M_ARENA_MAX of malloc.h, see mallopt(3).
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):
            ctypes.CDLL(None).mallopt(option, value)


def set_threads(ranks: int) -> None:
    """Share this machine's usable cores among its ranks, unless the user did.

    torchrun sets OMP_NUM_THREADS=1 when nobody did, so the environment of torchrun
    itself, the parent process, tells whether somebody did.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    if "LOCAL_RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # spawn inherits it
    elif b"OMP_NUM_THREADS=" not in Path(f"/proc/{os.getppid()}/environ").read_bytes():
        torch.set_num_threads(threads)
        dgl.utils.set_num_threads(threads)


def serve_store() -> dist.Store:
    """Open the ranks' meeting point: tcp://127.0.0.1:12345, or another free port.

    Left to itself torch would listen on every interface, and ask for no password.
    """
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 12345))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)  # spawn inherits it
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def parent_store() -> dist.Store:
    """Connect a spawned rank to the store that its parent serves."""
    if not mp.parent_process().is_alive():  # it died while this rank was importing
        sys.exit(1)
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def resume(rank: int, args, model: SAGE, optimizer: torch.optim.Optimizer) -> int:
    """Load args.snapshot into model and optimizer; return the epoch to go on with."""
    snapshot = [None]
    if rank == 0:
        path = Path(args.snapshot)
        if path.exists():
            snapshot = [read_snapshot(path, args, model)]
        else:  # find out now, not after an epoch, whether there is room for it
            probe = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
            write_atomically(path, b"\0" * probe, keep=False)
    dist.broadcast_object_list(snapshot, src=0)  # [distributed] one rank reads
    if snapshot[0] is None:
        return 0
    model.load_state_dict(snapshot[0]["model"])
    optimizer.load_state_dict(snapshot[0]["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = args.lr
    if rank == 0:
        print(f"Resumed: {args.snapshot}, {snapshot[0]['epoch']} epochs done")
    return snapshot[0]["epoch"]


def identity(args: argparse.Namespace, model: SAGE) -> dict:
    """Return what a snapshot and the run that continues from it must agree on."""
    return {
        "dataset": Path(args.dataset).name,
        "fanout": args.fanout,
        "layer sizes": model.sizes,
        "seed": args.seed,
    }


def read_snapshot(path: Path, args: argparse.Namespace, model: SAGE) -> dict:
    """Return the snapshot in `path`, or end with a line that says what is wrong."""
    try:
        # weights_only: a pickle from elsewhere could run any code.
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        theirs, ours = snapshot["identity"], identity(args, model)
        snapshot["model"], snapshot["optimizer"], snapshot["epoch"] + 0
    except Exception as error:
        fail(
            f"--snapshot={path}: not a snapshot of this script, or a damaged one "
            f"({type(error).__name__}); move it away or name another file"
        )
    for name, value in ours.items():
        if theirs.get(name) != value:
            fail(
                f"--snapshot={path}: made with {name} {theirs.get(name)}, but this run "
                f"has {value}; give the same arguments or name another file"
            )
    return snapshot


def save_snapshot(args, epoch: int, model: SAGE, optimizer) -> None:
    """Write what resume() needs to start epoch `epoch`."""
    buffer = io.BytesIO()
    torch.save(
        {
            "identity": identity(args, model),
            "epoch": epoch,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        buffer,
    )
    write_atomically(Path(args.snapshot), buffer.getbuffer())


def write_atomically(path: Path, content: bytes, keep: bool = True) -> None:
    """Replace `path` by `content` such that a crash leaves the old file or the new."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep:
            os.replace(partial, path)
        else:
            partial.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        fail(
            f"--snapshot={path}: cannot be written ({error.strerror}); "
            "free space or name another file"
        )


def write_synthetic(
    folder: Path,
    num_nodes: int = 40_000,
    num_edges: int = 800_000,
    num_features: int = 32,
    num_classes: int = 8,
    noise: float = 4.5,
) -> None:
    """Write a graph as a raw OnDiskDataset: metadata.yaml and .npy files.

    Degrees are heavy-tailed (weights from a Pareto distribution), 4 of 5 edges stay in
    a class, and features are the class's centre under noise. Replace the arrays by
    your own to train on your own graph. Nothing in it is left to chance.
    """
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(num_classes, size=num_nodes))
    first = np.searchsorted(labels, np.arange(num_classes + 1))  # class → first node
    weight = np.cumsum(np.minimum(1 + rng.pareto(1.5, num_nodes), num_nodes / 100))
    bounds = np.concatenate([[0], weight])[first]  # class → its range of weight

    def draw(low, high):
        points = rng.uniform(low, high, num_edges // 2)
        return np.searchsorted(weight, points, side="right").clip(max=num_nodes - 1)

    source = draw(0, weight[-1])
    inside = rng.random(num_edges // 2) < 0.8
    own = labels[source]
    target = draw(
        np.where(inside, bounds[own], 0), np.where(inside, bounds[own + 1], weight[-1])
    )
    names = rng.permutation(num_nodes)  # so that ids say nothing of the class
    edges = names[np.stack([source, target])]
    centres = rng.normal(size=(num_classes, num_features))
    feat = np.empty((num_nodes, num_features), np.float32)
    feat[names] = centres[labels] + noise * rng.normal(size=feat.shape)
    labels[names] = labels.copy()

    folder.mkdir(parents=True)
    np.save(folder / "edges.npy", np.concatenate([edges, edges[::-1]], axis=1))
    np.save(folder / "feat.npy", feat)
    order = rng.permutation(num_nodes)
    task = {"name": "node_classification", "num_classes": num_classes}
    for name, ids in zip(
        ("train_set", "validation_set", "test_set"),
        np.split(order, [num_nodes // 2, num_nodes * 3 // 4]),
    ):
        np.save(folder / f"{name}_seeds.npy", ids)
        np.save(folder / f"{name}_labels.npy", labels[ids])
        task[name] = [
            {
                "data": [
                    {"name": field, "format": "numpy", "path": f"{name}_{field}.npy"}
                    for field in ("seeds", "labels")
                ]
            }
        ]
    layout = {
        "dataset_name": "synthetic",
        "graph": {
            "nodes": [{"num": num_nodes}],
            "edges": [{"format": "numpy", "path": "edges.npy"}],
        },
        "feature_data": [
            {"domain": "node", "name": "feat", "format": "numpy", "path": "feat.npy"}
        ],
        "tasks": [task],
    }
    (folder / "metadata.yaml").write_text(yaml.safe_dump(layout, sort_keys=False))


def open_dataset(name: str, folder: Path) -> gb.OnDiskDataset:
    """Open the dataset `name`, which lies in `folder` or is made there first.

    A first run builds in a scratch folder and renames the finished result, so that no
    interrupted run leaves what the next one takes for complete.
    """
    if name not in DATASETS:
        return gb.OnDiskDataset(str(folder))
    root = folder.parent
    if not folder.exists():
        scratch = root / f".{name}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        if name == "synthetic":
            write_synthetic(scratch / name)
            gb.OnDiskDataset(str(scratch / name))
        else:
            gb.BuiltinDataset(name, root=str(scratch))
        for made in scratch.iterdir():
            made.rename(root / made.name)
        scratch.rmdir()
    if name == "synthetic":
        return gb.OnDiskDataset(str(folder), force_preprocess=False)
    return gb.BuiltinDataset(name, root=str(root))


@contextlib.contextmanager
def locked(folder: Path):
    """Let one process at a time prepare what is in `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load_dataset(args: argparse.Namespace, num_ranks: int) -> gb.OnDiskDataset:
    """Load `args.dataset` and check that `num_ranks` ranks can train on it."""
    name, folder = args.dataset, Path(args.dataset)
    cure = "mend its files; if they changed, delete its folder preprocessed"
    if name in DATASETS:
        # DGL 2.2 renamed its builtin datasets along with the field for seed nodes.
        old = (
            name == "synthetic"
            or "extra_attrs" in inspect.signature(gb.CopyTo).parameters
        )
        folder = Path("datasets", name if old else f"{name}-seeds")
        cure = f"delete {folder} and start again"
        folder.parent.mkdir(exist_ok=True)
        if not folder.exists():
            cure = "check the network and the free space, or use --dataset=synthetic"
            print(f"Preparing {name} in {folder}", file=sys.stderr)
    try:
        with (
            locked(folder if folder.exists() else folder.parent),
            contextlib.redirect_stdout(io.StringIO()),  # GraphBolt's chatter
        ):
            dataset = open_dataset(name, folder).load()
        problem = dataset_problem(dataset)
    except Exception as error:  # GraphBolt raises anything from KeyError to OSError
        problem = (
            f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
        )
    if problem:
        fail(f"--dataset={name}: {folder}: {problem}; {cure}")
    check_fit(args, dataset, num_ranks)
    return dataset


def dataset_problem(dataset: gb.OnDiskDataset) -> str | None:
    """Say what in a dataset the pipeline cannot work with; None if nothing.

    It reads each edge and label once and no feature row: 100 million edges take about
    a second.
    """
    graph, tasks = dataset.graph, dataset.tasks
    if graph is None or not isinstance(graph.num_nodes, int):
        return "the graph is not homogeneous (one type of node, one of edge)"
    nodes, indptr = graph.num_nodes, graph.csc_indptr
    if indptr[0] != 0 or indptr[-1] != len(graph.indices) or (indptr.diff() < 0).any():
        return "the graph's index pointers do not ascend from 0 to its edges"
    if outside(graph.indices, nodes):
        return f"an edge begins outside the graph's {nodes} nodes"
    if ("node", None, "feat") not in list(dataset.feature.keys()):
        return "there is no node feature named feat"
    shape = tuple(dataset.feature.read("node", None, "feat").shape)
    if len(shape) != 2 or shape[0] != nodes:
        return f"feat has shape {shape}, not ({nodes}, width)"
    classes = tasks[0].metadata.get("num_classes") if tasks else None
    if not isinstance(classes, int) or classes < 1:
        return "the first task has no num_classes"
    for name in SETS:
        itemset = getattr(tasks[0], name)
        if not itemset:
            continue
        if itemset.names not in (("seeds", "labels"), ("seed_nodes", "labels")):
            return f"{name} holds {itemset.names}, not ('seeds', 'labels')"
        ids, labels = itemset[:]
        if ids.dim() != 1 or ids.is_floating_point() or outside(ids, nodes):
            return f"{name} has seeds that are not ids of the graph's {nodes} nodes"
        if len(ids.unique()) < len(ids):
            return f"{name} has a seed more than once"
        if labels.numel() != len(ids):
            return f"{name} has {len(ids)} seeds but {labels.numel()} labels"
        # A NaN differs from the integer that it becomes.
        if (labels.long() != labels).any() or outside(labels, classes):
            return f"{name} has labels that are not integers from 0 to {classes - 1}"
    return None


def outside(values: torch.Tensor, limit: int) -> bool:
    """Tell whether any of the values is not in [0, limit)."""
    return len(values) > 0 and not 0 <= values.min() <= values.max() < limit


def check_fit(args: argparse.Namespace, dataset: gb.OnDiskDataset, ranks: int) -> None:
    """End if a rank would get no batch to train on, or memory would not do."""
    items = len(dataset.tasks[0].train_set or ())
    if args.epochs and items < args.batch_size * ranks:
        fail(
            f"--batch-size={args.batch_size}: {items} training items are not a batch "
            f"for each of {ranks} ranks; the largest that works is {items // ranks}"
            if items >= ranks
            else f"--dataset={args.dataset}: {items} training items for {ranks} ranks"
        )
    tensors = [dataset.graph.csc_indptr, dataset.graph.indices]
    tensors += [dataset.feature.read(*key) for key in dataset.feature.keys()]
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = shutil.disk_usage("/dev/shm").free
    if need > free:
        fail(
            f"/dev/shm: {free / 2**20:.0f} MiB free, but the ranks share {need / 2**20:.0f} "
            "MiB of graph and features there; start the container with --ipc=host or a "
            "larger --shm-size, or enlarge it: mount -o remount,size=90% /dev/shm"
        )


def check_machine(args: argparse.Namespace) -> list[torch.device]:
    """Settle the mode and return the devices, or end if this machine lacks them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lacking = None
    if gpus == 0:
        lacking = f"torch {torch.__version__} finds no CUDA GPU here (try nvidia-smi)"
    elif get_global_func("device_api.cuda", allow_missing=True) is None:
        lacking = (
            f"dgl {dgl.__version__} was built without CUDA (README.md, Install, names "
            "the CUDA build for your torch)"
        )
    if args.mode is None:
        args.mode = "cpu-cpu" if lacking else "pinned-cuda"
        if lacking and os.environ.get("RANK", "0") == "0":
            print(f"Running on the CPU (--mode=cpu-cpu): {lacking}", flush=True)
    storage, training = args.mode.split("-")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(args.gpu)))
    if training == "cuda" and lacking:
        fail(f"--mode={args.mode}: {lacking}")
    if training == "cuda" and max(args.gpu) >= gpus:
        fail(
            f"--gpu: there is no GPU {max(args.gpu)}; this machine has {gpus}, from 0 on"
        )
    if len(args.gpu) < local_ranks:
        fail(
            f"--gpu: {len(args.gpu)} ids for the {local_ranks} local ranks of torchrun"
        )
    if args.num_workers and (storage != "cpu" or args.gpu_cache_size):
        fail(
            "--num-workers: worker processes cannot use the GPU; they need "
            "--mode=cpu-cuda or cpu-cpu, and --gpu-cache-size=0"
        )
    if args.gpu_cache_size and args.mode in ("cuda-cuda", "cpu-cpu"):
        fail(f"--gpu-cache-size: has no use with --mode={args.mode}")
    return [
        torch.device("cuda", i) if training == "cuda" else torch.device("cpu")
        for i in args.gpu
    ]


def fail(message: str) -> NoReturn:
    """End this process with one line; of a machine's torchrun ranks one speaks."""
    sys.exit(f"error: {message}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see --help)")


def checked(parse: Callable, allowed: Callable, what: str) -> Callable:
    """Return an argparse type that takes only what `parse` and `allowed` do."""

    def convert(text: str):
        with contextlib.suppress(ValueError):
            value = parse(text)
            if allowed(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")

    return convert


def integers(text: str) -> list[int]:
    """Return the integers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments, each in its range; see check_machine()."""
    positive = checked(int, lambda n: n > 0, "an integer above 0")
    not_negative = checked(int, lambda n: n >= 0, "0 or an integer above")
    parser = ArgumentParser(
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--gpu",
        # One for each process that torchrun started on this machine, or 0.
        default=",".join(map(str, range(int(os.environ.get("LOCAL_WORLD_SIZE", 1))))),
        type=checked(
            integers,
            lambda ids: min(ids) >= 0 and len(set(ids)) == len(ids),
            "different GPU ids, such as 0,1",
        ),
        help="comma-separated GPU ids, one process (rank) for each; on the CPU, one process per entry",
    )
    add("--epochs", default=10, type=not_negative, help="training epochs; 0 only tests")
    add(
        "--lr",
        default=0.001,
        type=checked(float, lambda x: 0 < x < math.inf, "a positive number"),
        help="Adam learning rate",
    )
    add(
        "--batch-size", default=1024, type=positive, help="seed nodes per rank and step"
    )
    add(
        "--fanout",
        default="10,10,10",
        type=checked(
            integers,
            lambda fanout: all(n == -1 or n > 0 for n in fanout),
            "neighbours per layer, such as 10,10 (-1: all)",
        ),
        help="neighbours sampled per layer, outermost first; -1 takes all; one entry per GraphSAGE layer",
    )
    add(
        "--num-workers",
        default=0,
        type=not_negative,
        help="sampling worker processes per rank (CPU storage only)",
    )
    add(
        "--gpu-cache-size",
        default=0,
        type=not_negative,
        help="bytes of GPU memory, per GPU, that cache hot node features (not with CUDA storage)",
    )
    add(
        "--dataset",
        default="ogbn-products",
        help=f"{', '.join(DATASETS)}, or a folder that holds a GraphBolt OnDiskDataset",
    )
    add(
        "--mode",
        choices=("cpu-cuda", "pinned-cuda", "cuda-cuda", "cpu-cpu"),
        help="storage-training (default: pinned-cuda where CUDA is there, else cpu-cpu)",
    )
    add(
        "--seed",
        default=0,
        type=checked(int, lambda n: 0 <= n < 2**31, "an integer from 0 to 2147483647"),
        help="seeds model, shuffling and sampling",
    )
    add("--snapshot", help="file to save to after every epoch and to resume from")
    return parser.parse_args()


def join_torchrun(args: argparse.Namespace, devices: list[torch.device]) -> None:
    """Be one of the ranks that torchrun started."""
    machine, local_rank = os.environ["GROUP_RANK"], int(os.environ["LOCAL_RANK"])
    # A day, because others wait here for rank 0 of their machine to download.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(days=1)))
    if local_rank == 0:
        dataset = load_dataset(args, world_size)
        # The pickle holds handles of shared memory, not the data. torchrun's agents
        # unpickle what they find in this store too, so trust in it is not new.
        store.set(f"dataset/{machine}", bytes(ForkingPickler.dumps(dataset)))
    else:
        dataset = ForkingPickler.loads(store.get(f"dataset/{machine}"))
    run(rank, world_size, args, devices, dataset, store)


def main() -> None:
    """Load the dataset once and start a rank for each device."""
    args = parse_args()
    devices = check_machine(args)
    mp.set_sharing_strategy("file_system")  # handles outlive the limit on open files
    world_size = int(os.environ.get("WORLD_SIZE", len(devices)))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    set_threads(local_size)
    if world_size == local_size:  # one machine: gloo and NCCL need not listen outside
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "LOCAL_RANK" in os.environ:
        return join_torchrun(args, devices)
    dataset = load_dataset(args, world_size)
    store = serve_store()  # noqa: F841
    try:
        mp.spawn(run, args=(world_size, args, devices, dataset), nprocs=world_size)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(
            f"error: rank {error.error_index} failed, all were ended: {error.msg.strip()}"
        )


if __name__ == "__main__":
    main()
