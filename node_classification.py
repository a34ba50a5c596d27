"""Train GraphSAGE for node classification on several GPUs with DGL GraphBolt.

One process (rank) per GPU: GraphBolt samples and loads the mini-batches, PyTorch
DistributedDataParallel (DDP) keeps the replicas of the model equal. [distributed]
marks the steps that are there only because there are several ranks.

    main ── check the arguments, load_dataset once per machine, before any rank starts
         ── one run() per device: mp.spawn, or this process if torchrun started it
              run(rank, world_size, args, devices, dataset)
               ├─ device, process group (NCCL on GPUs, gloo on the CPU)
               ├─ graph and features to their storage (pinned | cuda | cpu), GPU cache
               ├─ SAGE → DDP; train / validation / test dataloaders
               ├─ train(): epochs under Join, evaluate(), weighted_reduce(), snapshot
               └─ evaluate() on the test set, weighted_reduce(), leave the process group

    python node_classification.py --gpu=0,1 --dataset=synthetic --mode=cpu-cpu
    python node_classification.py --gpu=0,1,2,3  # a rank for each GPU id
    torchrun --standalone --nproc-per-node=2 node_classification.py
"""

import contextlib
import ctypes
import fcntl
import gc
import inspect
import io
import json
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from importlib import metadata
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a collective, too
os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL prints a banner
warnings.filterwarnings("ignore", module=r"(dgl|torch|torchdata)\b")
gc.disable()  # it would look again and again at what the imports leave for good
try:
    with contextlib.redirect_stderr(io.StringIO()):  # numpy 2 would print a traceback
        import dgl.sparse
        import numpy as np
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from dgl import graphbolt as gb
        from torch import Tensor, nn
        from torch.distributed.algorithms.join import Join
        from torch.nn.parallel import DistributedDataParallel as DDP
        from tqdm import tqdm

    metadata.version("torchmetrics")  # evaluate() imports it, in the ranks alone
    torch.from_numpy(np.zeros(1))  # fails where numpy 2 meets an older torch
except Exception as error:  # noqa: BLE001 (DGL raises any type, and names no cure)
    have = {f.metadata["Name"]: f.version for f in [*metadata.distributions()][::-1]}
    names = ["torch", "dgl", "torchdata", "numpy", "pandas", "pydantic", "PyYAML"]
    sys.exit(
        f"error: packages do not fit each other: {type(error).__name__}: {error}\n"
        f"installed: {', '.join(f'{name} {have.get(name)}' for name in names)}\n"
        "fits: torch 2.2.1, dgl 2.1.0, torchdata 0.7.1, numpy<2 (CUDA: see README.md)\n"
        "run: pip install -r requirements.txt"
    )
gc.freeze()  # with gc.disable(): a second less, of almost 4, for each process
gc.enable()


class SAGE(nn.Module):
    """GraphSAGE with the mean aggregator (Hamilton et al., arXiv:1706.02216)."""

    def __init__(self, in_size: int, hidden_size: int, out_size: int, num_layers=3):
        super().__init__()
        sizes = [in_size] + [hidden_size] * (num_layers - 1) + [out_size]
        layers = (dgl.nn.SAGEConv(*sizes[i : i + 2], "mean") for i in range(num_layers))
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: list[dgl.DGLGraph], x: Tensor) -> Tensor:
        """Map float32 (source nodes of blocks[0], in_size) to (seed nodes, out_size)."""
        for layer, block in zip(self.layers[:-1], blocks):
            x = self.dropout(torch.relu(layer(block, x)))
        return self.layers[-1](blocks[-1], x)


def create_dataloader(
    args: Namespace,
    graph: gb.FusedCSCSamplingGraph,
    features: gb.FeatureStore,
    itemset: gb.ItemSet | None,
    device: torch.device,
    is_train: bool,
) -> gb.DataLoader | list:
    """Chain the stages that make mini-batches of this rank's share of `itemset`.

    A mini-batch has `labels`, `blocks` and, in `node_features["feat"]`, a row for each
    source node of blocks[0]. An absent or empty set has none: the list is empty.
    """
    if not itemset:
        return []
    storage = args.mode.split("-")[0]
    # [distributed] Each replica gets its own part of the items. Training drops what
    # would give replicas unequal batches; evaluation must see every item once.
    datapipe = sampler = gb.DistributedItemSampler(
        itemset,
        batch_size=args.batch_size,
        shuffle=is_train,
        drop_last=is_train,
        drop_uneven_inputs=is_train,
        **known(gb.DistributedItemSampler, seed=args.seed),
    )
    # Where the GPU can reach the graph, sampling runs there: the seeds go first.
    if storage != "cpu":
        seeds = known(gb.CopyTo, extra_attrs=[itemset.names[0]])
        datapipe = datapipe.copy_to(device, **seeds)
    overlap = {"overlap_fetch": storage == "pinned", "asynchronous": storage != "cpu"}
    overlap = known(gb.NeighborSampler, **overlap)
    datapipe = datapipe.sample_neighbor(graph, args.fanout, **overlap)
    # A GPU cache before features in CPU memory looks nodes up on the GPU.
    if cached := storage == "cpu" and args.gpu_cache_size > 0:
        nodes = known(gb.CopyTo, extra_attrs=["input_nodes"])
        datapipe = datapipe.copy_to(device, **nodes)
    datapipe = datapipe.fetch_feature(features, node_feature_keys=["feat"])
    # With CPU storage the finished mini-batch is copied. Without a GPU there is no
    # need, and the thread that comes with the stage would take cores from training.
    if storage == "cpu" and device.type != "cpu" and not cached:
        datapipe = datapipe.copy_to(device)
    overlap = {"overlap_graph_fetch": storage == "pinned"}
    overlap = known(gb.DataLoader, overlap_feature_fetch=storage != "cpu", **overlap)
    dataloader = gb.DataLoader(datapipe, num_workers=args.num_workers, **overlap)
    dataloader.rng = getattr(sampler, "_rng", None)  # for seed_rank(), before DGL 2.3
    return dataloader


def weighted_reduce(tensor: Tensor, weight: Tensor, dst: int = 0) -> Tensor:
    """Sum `tensor` and `weight` onto rank `dst`, in place, and return their quotient.

    With a rank's sum over its items and the number of its items this is the exact mean
    over all ranks, however unequal their shares. On other ranks it is meaningless.
    """
    dist.reduce(tensor, dst=dst)
    dist.reduce(weight, dst=dst)
    return tensor / weight


@torch.no_grad()
def evaluate(
    rank: int,
    model: nn.Module,
    dataloader: gb.DataLoader | list,
    num_classes: int,
    device: torch.device,
    phase: str = "Evaluation",
) -> tuple[Tensor, Tensor]:
    """Return this rank's accuracy (float64) and its number of items (int64).

    `model` is the bare module: ranks may have unequal numbers of batches, or none, and
    DDP's forward would wait for its peers.
    """
    import torchmetrics.functional as MF  # 0.7 s that the parent need not spend

    model.eval()
    predicted, labels = [], []
    for data in tqdm(dataloader, phase, leave=False, disable=rank > 0 or None):
        logits = model(data.blocks, data.node_features["feat"].float())
        predicted.append(logits.argmax(dim=1))  # class ids; logits would fill memory
        labels.append(data.labels.long().flatten())
    num_items = torch.tensor(sum(map(len, labels)), device=device)
    if num_items == 0:  # more ranks than batches
        return num_items.double(), num_items
    predicted, labels = torch.cat(predicted), torch.cat(labels)
    accuracy = MF.accuracy(predicted, labels, "multiclass", num_classes=num_classes)
    return accuracy.double(), num_items


def train(
    rank: int,
    args: Namespace,
    train_dataloader: gb.DataLoader,
    valid_dataloader: gb.DataLoader | list,
    num_classes: int,
    model: DDP,
    device: torch.device,
) -> None:
    """Train up to epoch `args.epochs`; rank 0 prints a line for each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    first_epoch = resume(rank, args, model.module, optimizer) if args.snapshot else 0
    for epoch in range(first_epoch, args.epochs):
        seed_rank(args.seed, epoch, rank, train_dataloader.rng)
        start = time.perf_counter()
        phase, quiet = f"Epoch {epoch:05d} training", rank > 0 or None
        model.train()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_seeds = torch.zeros((), dtype=torch.int64, device=device)
        # [distributed] Under Join a rank that is out of batches still answers the
        # gradient exchange of the others; without it they would wait for ever.
        with Join([model]):
            for data in tqdm(train_dataloader, phase, leave=False, disable=quiet):
                labels = data.labels.long().flatten()
                logits = model(data.blocks, data.node_features["feat"].float())
                loss = nn.functional.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()  # [distributed] DDP averages the ranks' gradients
                optimizer.step()
                loss_sum += loss.detach() * len(labels)
                num_seeds += len(labels)
        # item() waits for the device, so the clock is read when the work is done.
        mean_loss = weighted_reduce(loss_sum, num_seeds).item()
        train_time = time.perf_counter() - start
        phase = f"Epoch {epoch:05d} validation"
        accuracy, num_items = evaluate(
            rank, model.module, valid_dataloader, num_classes, device, phase
        )
        # [distributed] Counts travel, not means; rounding undoes a float32 division.
        accuracy = weighted_reduce((accuracy * num_items).round(), num_items).item()
        if rank == 0:
            print(
                f"Epoch {epoch:05d} | Average Loss {mean_loss:.4f} | "
                f"Accuracy {accuracy:.4f} | Time {time.perf_counter() - start:.4f} | "
                f"Train {train_time:.4f} | Seeds/s {num_seeds / train_time:.0f}",
                flush=True,
            )
            if args.snapshot:
                save_snapshot(args, epoch + 1, model.module, optimizer)


def run(
    rank: int,
    world_size: int,
    args: Namespace,
    devices: list[torch.device],
    dataset: gb.OnDiskDataset,
    store: dist.Store | None = None,
) -> None:
    """Be rank `rank` of `world_size`: join the group, train, test, leave."""
    device = devices[int(os.environ.get("LOCAL_RANK", rank))]
    # [distributed] The GPU is chosen first: else every rank would allocate on GPU 0.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:  # spawned, and the parent may have died meanwhile
        stop(not mp.parent_process().is_alive(), "the parent process died")
        store = dist.TCPStore("127.0.0.1", args.port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    # Pinned, the one shared copy in CPU memory is in reach of every rank's GPU.
    graph, task = dataset.graph, dataset.tasks[0]
    feature = gb.TorchBasedFeature(dataset.feature.read("node", None, "feat"))
    if args.mode.startswith("pinned"):
        graph.pin_memory_()
        feature.pin_memory_()
    elif args.mode.startswith("cuda"):
        graph, feature = graph.to(device), feature.to(device)
    else:
        speed_up_cpu(graph.num_nodes)
    in_size, num_classes = feature.size()[0], task.metadata["num_classes"]
    if args.gpu_cache_size > 0:
        feature = gpu_cached(feature, args.gpu_cache_size)
    features = gb.BasicFeatureStore({("node", None, "feat"): feature})

    seed_rank(args.seed, 0, 0)  # the same model in every rank
    model = DDP(SAGE(in_size, 256, num_classes, len(args.fanout)).to(device))
    train_set, val_set, test_set = (getattr(task, name) or () for name in SETS)
    train_dataloader = create_dataloader(args, graph, features, train_set, device, True)
    valid_dataloader = create_dataloader(args, graph, features, val_set, device, False)
    test_dataloader = create_dataloader(args, graph, features, test_set, device, False)

    if rank == 0:
        print(f"Processes: {world_size}\nDevices: {', '.join(map(str, devices))}")
        print(f"Backend: {backend}\nMode: {args.mode}\nDataset: {args.dataset}")
        print(f"Graph: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges")
        print(f"Task: {in_size} features, {num_classes} classes")
        print(f"Split: {len(train_set):,} train, ", end="")
        print(f"{len(val_set):,} validation, {len(test_set):,} test", flush=True)
    train(rank, args, train_dataloader, valid_dataloader, num_classes, model, device)
    seed_rank(args.seed, args.epochs, rank)
    accuracy, num_items = evaluate(
        rank, model.module, test_dataloader, num_classes, device, "Test"
    )
    accuracy = weighted_reduce((accuracy * num_items).round(), num_items)
    if rank == 0 and test_set:
        print(f"Test Accuracy {accuracy:.4f}", flush=True)
    # [distributed] No rank leaves while another needs it. In the pause gloo's threads
    # free the last tensors. For that they need the interpreter's lock, which destroying
    # the group holds while it waits for them: without the pause the run may never end.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


def known(function, **kwargs) -> dict:
    """Keep the arguments that the installed DGL knows; most are DGL 2.4's."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}


def gpu_cached(feature: gb.Feature, num_bytes: int) -> gb.Feature:
    """Put a cache of `num_bytes` of GPU memory before `feature`."""
    new = callable(getattr(gb, "gpu_cached_feature", None))  # a module before DGL 2.4
    make = gb.gpu_cached_feature if new else gb.GPUCachedFeature
    if "cache_size" in inspect.signature(make).parameters:  # DGL 2.1 counts in rows
        num_bytes = max(1, num_bytes // feature.read(torch.tensor([0])).nbytes)
    return make(feature, num_bytes)


def seed_rank(seed: int, epoch: int, rank: int, rng=None) -> None:
    """Seed order, neighbours and dropout; by epoch, so that resuming repeats them."""
    torch.manual_seed(stream := ((seed * 10_000 + epoch) * 10_000 + rank) % 2**63)
    gb.seed(stream)
    if rng is not None:
        rng.bit_generator.state = np.random.PCG64(stream).state


def speed_up_cpu(num_nodes: int) -> None:
    """Keep freed memory; have DGL 2.1 read features 3, renumber 4 times as fast."""
    # New pages cost most of a step. M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX: mallopt(3)
    for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):
        ctypes.CDLL(None).mallopt(option, value)
    if not dgl.__version__.startswith("2.1."):
        return
    table = torch.empty(num_nodes, dtype=torch.int32)  # one thread writes it

    def read(rows: Tensor, ids: Tensor) -> Tensor:
        return rows.index_select(0, ids.cpu())

    def renumber(csc: gb.CSCFormatBase, seeds: Tensor):
        nodes = torch.cat([seeds, csc.indices])
        order = torch.arange(len(nodes), dtype=torch.int32)
        table.scatter_(0, nodes.long(), order)
        table.scatter_(0, seeds.long(), order[: len(seeds)])  # distinct: stay first
        place = table.index_select(0, nodes)
        unique = place == order
        numbers = unique.cumsum(0, dtype=torch.int32) - 1
        csc.indices = numbers.index_select(0, place[len(seeds) :])
        return nodes[unique], csc

    gb.impl.torch_based_feature_store.index_select = read
    gb.impl.neighbor_sampler.unique_and_compact_csc_formats = renumber


def serve_store() -> dist.Store:
    """Open the ranks' meeting point on loopback; torch would listen everywhere."""
    try:
        server = socket.create_server(("127.0.0.1", 12345))
    except OSError:  # busy
        server = socket.create_server(("127.0.0.1", 0))
    port, fd = server.getsockname()[1], server.detach()
    ours = {"is_master": True, "wait_for_workers": False, "use_libuv": False}
    return dist.TCPStore("127.0.0.1", port, master_listen_fd=fd, **ours)


def resume(rank: int, args, model: SAGE, optimizer: torch.optim.Optimizer) -> int:
    """Load args.snapshot, if it is there; return the number of epochs it has done."""
    states, flag = [{"epoch": 0}], f"--snapshot={args.snapshot}:"
    if rank == 0 and os.path.exists(args.snapshot):
        try:  # weights_only: a pickle from elsewhere could run any code
            states = [torch.load(args.snapshot, map_location="cpu", weights_only=True)]
            for key in MUST_MATCH:
                theirs, ours = states[0][key], getattr(args, key)
                stop(theirs != ours, f"{flag} made with --{key}={theirs}, not {ours}")
            model.load_state_dict(states[0]["model"])
            optimizer.load_state_dict(states[0]["optimizer"])
        except Exception as error:  # noqa: BLE001 (torch.load raises any type)
            stop(True, f"{flag} damaged, or of another model ({type(error).__name__})")
    dist.broadcast_object_list(states)  # [distributed] rank 0 reads for all
    if "model" in states[0]:
        model.load_state_dict(states[0]["model"])
        optimizer.load_state_dict(states[0]["optimizer"])
        optimizer.param_groups[0]["lr"] = args.lr
    if rank == 0 and states[0]["epoch"] < args.epochs:  # tell now whether it can
        save_snapshot(args, states[0]["epoch"], model, optimizer)
    return states[0]["epoch"]


def save_snapshot(args, epoch: int, model: SAGE, optimizer) -> None:
    """Write what resume() needs; a crash leaves the old file or the new one."""
    state = {key: getattr(args, key) for key in MUST_MATCH} | {"epoch": epoch}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, buffer := io.BytesIO())
    try:
        with open(f"{args.snapshot}.partial", "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, args.snapshot)
    except OSError as error:
        stop(True, f"--snapshot={args.snapshot}: cannot be written: {error.strerror}")


def write_synthetic(folder: Path, nodes=40_000, edges=800_000, width=32, classes=8):
    """Write a raw OnDiskDataset: metadata.yaml, and arrays in .npy files."""
    rng = np.random.default_rng(0)
    # Low numbers have most edges; 4 of 5 edges stay in a class, number % classes.
    ends = (nodes * rng.random((2, edges // 2)) ** 2.5).astype(np.int64)
    same = rng.random(edges // 2) < 0.8
    ends[1, same] += ends[0, same] % classes - ends[1, same] % classes
    ids = rng.permutation(nodes)
    labels = np.argsort(ids) % classes
    centres = 0.22 * rng.normal(size=(classes, width))
    feat = (centres[labels] + rng.normal(size=(nodes, width))).astype(np.float32)
    split = np.split(rng.permutation(nodes), [nodes // 2, nodes * 3 // 4])

    def saved(path: str, array: np.ndarray, **entry) -> dict:
        np.save(folder / path, array)
        return {"format": "numpy", "path": path, **entry}

    folder.mkdir(parents=True)
    edges = saved("edges.npy", ids[np.hstack([ends, ends[::-1]])])
    task = {"num_classes": classes}
    for name, seeds in zip(SETS, split):
        fields = {"seeds": seeds, "labels": labels[seeds]}.items()
        data = [saved(f"{name}_{key}.npy", array, name=key) for key, array in fields]
        task[name] = [{"data": data}]
    layout = {"graph": {"nodes": [{"num": nodes}], "edges": [edges]}, "tasks": [task]}
    layout["feature_data"] = [saved("feat.npy", feat, domain="node", name="feat")]
    (folder / "metadata.yaml").write_text(json.dumps(layout, indent=1))  # YAML, too


def spmatrix(indices, val=None, shape=None, convert=dgl.sparse.spmatrix):
    """Convert edges for GraphBolt; one beyond the nodes would crash this process."""
    if shape and len(indices[0]) and not 0 <= indices.min() <= indices.max() < shape[0]:
        raise ValueError(f"edges are not among its {shape[0]} nodes")
    return convert(indices, val, shape)


def load_dataset(args: Namespace, ranks: int) -> gb.OnDiskDataset:
    """Load args.dataset, made first if need be, and check that it can be trained on."""
    name, folder = args.dataset, Path(args.dataset)
    try:
        if name in DATASETS:
            folder = Path("datasets", name)
            folder.parent.mkdir(exist_ok=True)
        # One process at a time: two first runs must not disturb each other.
        lock = os.open(folder.parent if name in DATASETS else folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if name == "synthetic" and not folder.exists():
            # Written elsewhere and renamed: no half is ever taken for the whole.
            shutil.rmtree(scratch := folder.with_name(".synthetic"), ignore_errors=True)
            write_synthetic(scratch)
            scratch.rename(folder)
        builtin = name in DATASETS and name != "synthetic"
        with contextlib.redirect_stdout(io.StringIO()):  # GraphBolt's chatter
            open_dataset = gb.BuiltinDataset if builtin else gb.OnDiskDataset
            dataset = open_dataset(name if builtin else str(folder)).load()
        os.close(lock)
        check_dataset(dataset, args, ranks)
    except Exception as error:  # noqa: BLE001 (GraphBolt raises any type)
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        cure = f"name one of {', '.join(DATASETS)}, or mend"
        cure = "check network, disk; delete" if name in DATASETS else cure
        stop(True, f"--dataset={name}: cannot be read ({what}); {cure} {folder}")
    return dataset


def check_dataset(dataset, args: Namespace, ranks: int) -> None:
    """Stop if so many ranks cannot train on the dataset; reads no feature row."""

    def within(values: Tensor, limit: int) -> bool:
        return len(values) == 0 or 0 <= values.min() <= values.max() < limit

    def need(met: bool, what: str) -> None:
        stop(not met, f"--dataset={args.dataset}: {what}")

    graph, store, tasks = dataset.graph, dataset.feature, dataset.tasks
    need(graph and isinstance(graph.num_nodes, int), "the graph is not homogeneous")
    nodes, indptr, indices = graph.num_nodes, graph.csc_indptr, graph.indices
    whole = indptr[0] == 0 and indptr[-1] == len(indices) and indptr.diff().min() >= 0
    need(whole and within(indices, nodes), f"its edges are not among its {nodes} nodes")
    stored = {key: store.read(*key) for key in list(store.keys())}
    feat = stored.get(("node", None, "feat"), torch.empty(0))
    rows = feat.dim() == 2 and len(feat) == nodes and feat.numel() > 0
    need(rows, f"it needs a node feature named feat, a row for each of {nodes} nodes")
    classes = tasks[0].metadata.get("num_classes") if tasks else None
    need(isinstance(classes, int), "its first task has no num_classes")
    shared = [indptr, indices, *stored.values()]
    for name in (name for name in SETS if getattr(tasks[0], name)):
        itemset = getattr(tasks[0], name)
        named = itemset.names in (("seeds", "labels"), ("seed_nodes", "labels"))
        named = named and isinstance(itemset, gb.ItemSet)
        need(named, f"{name} needs seeds and labels, in this order, and no node type")
        seeds, labels = itemset[:]
        shared += [seeds, labels]
        paired = len(seeds.unique()) == len(seeds) == len(labels) == labels.numel()
        need(paired and within(seeds, nodes), f"{name} needs distinct, labelled nodes")
        valid = within(labels, classes) and (labels.long() == labels).all()
        need(valid, f"{name} has labels other than 0 to {classes - 1}")
    most = len(tasks[0].train_set or ()) // ranks if args.epochs else args.batch_size
    stop(args.batch_size > most, f"--batch-size: at most {most} training items a rank")
    lack = sum(t.nbytes for t in shared) + 2**20 - shutil.disk_usage("/dev/shm").free
    need(lack <= 0, f"/dev/shm lacks {lack >> 20} MiB: --ipc=host or --shm-size")


def settle_devices(args: Namespace) -> list[torch.device]:
    """Choose args.mode if it is open, check the arguments, return the devices."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lacking = "" if gpus else f"torch {torch.__version__} finds no GPU"
    if gpus and dgl._ffi.function.get_global_func("device_api.cuda", True) is None:
        lacking = f"dgl {dgl.__version__} is without CUDA; README.md names CUDA builds"
    if args.mode is None:
        args.mode = "cpu-cpu" if lacking else "pinned-cuda"
        if lacking and ("LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"):
            print(f"Running on the CPU (--mode=cpu-cpu): {lacking}", flush=True)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(args.gpu)))
    ids, cache, cuda = args.gpu, args.gpu_cache_size, args.mode.endswith("-cuda")
    stop(cuda and lacking, f"--mode={args.mode}: {lacking}")
    stop(min(ids) < 0 or len(set(ids)) < len(ids), "--gpu: needs distinct ids >= 0")
    stop(cuda and max(ids) >= gpus, f"--gpu: this machine has {gpus} GPUs, from 0 on")
    stop(len(ids) < ranks, f"--gpu: torchrun has {ranks} ranks here, each needs an id")
    counts = (args.epochs, args.num_workers, cache, args.seed)
    stop(min(counts) < 0, "--epochs, --num-workers, --gpu-cache-size, --seed: from 0")
    stop(args.batch_size < 1, "--batch-size: from 1 on")
    stop(not 0 < args.lr < float("inf"), "--lr: must be above 0 and finite")
    stop(min(args.fanout) < -1 or 0 in args.fanout, "--fanout: from 1, or -1 for all")
    busy = args.num_workers and (cache or not args.mode.startswith("cpu-"))
    stop(busy, "--num-workers: needs CPU storage and --gpu-cache-size=0")
    if args.mode in ("cuda-cuda", "cpu-cpu"):
        stop(cache, f"--gpu-cache-size: has no use with --mode={args.mode}")
    return [torch.device(f"cuda:{number}" if cuda else "cpu") for number in ids[:ranks]]


def stop(broken: bool, problem: str) -> None:
    """End with a line if something is `broken`; of a machine's ranks one speaks."""
    if broken:
        sys.exit(f"error: {problem}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


def parse_args() -> Namespace:
    """Return the command line's arguments; settle_devices() checks their values."""

    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda message: stop(True, f"{message}; see --help")
    add = parser.add_argument
    ids = ",".join(map(str, range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))
    add("--gpu", type=integers, default=ids, help="GPU ids, one rank each (0)")
    add("--epochs", type=int, default=10, help="training epochs (10)")
    add("--lr", type=float, default=0.001, help="Adam learning rate (0.001)")
    add("--batch-size", type=int, default=1024, help="seeds per rank and step (1024)")
    add("--fanout", type=integers, default="10,10,10", help="neighbours (10,10,10)")
    add("--num-workers", type=int, default=0, help="sampling processes per rank (0)")
    add("--gpu-cache-size", type=int, default=0, help="bytes of features per GPU (0)")
    add("--dataset", default="ogbn-products", help=f"{', '.join(DATASETS)} or a folder")
    modes = ("cpu-cuda", "pinned-cuda", "cuda-cuda", "cpu-cpu")
    add("--mode", choices=modes, help="storage-training (pinned-cuda, or else cpu-cpu)")
    add("--seed", type=int, default=0, help="seeds model, shuffling, sampling (0)")
    add("--snapshot", help="file to save to after every epoch and to resume from")
    return parser.parse_args()


def main() -> None:
    """Load the dataset once for this machine and start its ranks, or be one of them."""
    args = parse_args()
    devices = settle_devices(args)
    torchrun = "LOCAL_RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if torchrun else len(devices)
    threads = max(1, len(os.sched_getaffinity(0)) // len(devices))
    if not torchrun:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # spawn inherits these
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else may connect
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dataset = load_dataset(args, world_size)
        args.port = (store := serve_store()).port  # open as long as this name lives
        sys.warnoptions.append("ignore:resource_tracker")  # its complaint after a kill
        try:
            return mp.spawn(run, (world_size, args, devices, dataset), world_size)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            told = getattr(error, "exit_code", 0) == 1  # why, by the rank in stop()
            sys.exit(told or f"error: rank {error.error_index}: {error.msg.strip()}")
    # torchrun sets OMP_NUM_THREADS=1 if the user set none, as its own environment tells.
    if b"OMP_NUM_THREADS=" not in Path(f"/proc/{os.getppid()}/environ").read_bytes():
        torch.set_num_threads(threads)
        dgl.utils.set_num_threads(threads)
    a_day = 48 * dist.default_pg_timeout  # others wait while local rank 0 downloads
    store, rank, _ = next(dist.rendezvous("env://", timeout=a_day))
    key, pickler = f"dataset {os.environ['GROUP_RANK']}", mp.reductions.ForkingPickler
    if os.environ["LOCAL_RANK"] == "0":
        dataset = load_dataset(args, world_size)
        store.set(key, bytes(pickler.dumps(dataset)))  # says where the shared data lie
    else:
        dataset = pickler.loads(store.get(key))
    run(rank, world_size, args, devices, dataset, store)


mp.set_sharing_strategy("file_system")  # spares open files, here and in workers
dgl.sparse.spmatrix = spmatrix  # GraphBolt calls it to preprocess
# Else each pass over a torch DataLoader opens a gloo group for good. bool() is False.
torch.utils.data.dataloader.dist = Namespace(is_available=bool, ProcessGroup=())
DATASETS = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "synthetic")
MUST_MATCH = ("dataset", "fanout", "seed")  # between a snapshot and a run
SETS = ("train_set", "validation_set", "test_set")

if __name__ == "__main__":
    main()
