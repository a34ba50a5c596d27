"""The data pipeline: shares, mini-batches, storage, and what each DGL version knows."""

import argparse
import inspect

import numpy as np
import pytest
import torch
from conftest import arguments, arrays, load, pipeline
from dgl import graphbolt as gb

import node_classification as nc

CPU = torch.device("cpu")


def deal(rank, is_train):
    items = torch.arange(15)
    itemset = gb.ItemSet((items, items % 4), names=("seeds", "labels"))
    indptr = torch.arange(16)
    graph = gb.fused_csc_sampling_graph(indptr, torch.arange(15))
    feature = gb.TorchBasedFeature(torch.arange(15.0).reshape(-1, 1))
    features = gb.BasicFeatureStore({("node", None, "feat"): feature})
    args = arguments("--batch-size=2", "--fanout=1")
    loader = nc.create_dataloader(args, graph, features, itemset, CPU, is_train)
    nc.seed_rank(0, 0, rank)
    return [batch.seeds.tolist() for batch in loader]


def test_evaluation_deals_every_item_to_one_replica(in_ranks):
    assert in_ranks(4, deal, False) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], [10, 11]],
        [[12, 13], [14]],
    ]


def test_training_deals_each_replica_as_many_full_batches(in_ranks):
    dealt = in_ranks(4, deal, True)
    shares = [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14}]
    for batches, share in zip(dealt, shares, strict=True):
        assert [len(batch) for batch in batches] == [2]
        assert set(batches[0]) <= share


def pass_twice(rank, path):
    loader = pipeline(arguments("--batch-size=32"), load(path))
    for _ in range(2):
        list(loader)
    return len(torch.distributed.distributed_c10d._world.pg_map)


def test_passes_over_a_dataloader_open_no_further_process_group(in_ranks, tiny):
    assert in_ranks(2, pass_twice, tiny) == [1, 1]


def visit(rank, path, workers):
    args = arguments("--batch-size=32", f"--num-workers={workers}")
    loader = pipeline(args, load(path))
    return sorted(seed for _ in range(2) for b in loader for seed in b.seeds.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_visit_every_seed_node_once_an_epoch(in_ranks, tiny, workers):
    first, second = in_ranks(2, visit, tiny, workers)
    seeds, _ = arrays(tiny, "test_set")
    assert sorted(first + second) == sorted([*seeds, *seeds])


def collect(rank, path, mode):
    """Check every mini-batch of the pipeline that `mode` builds, on the CPU device."""
    args = arguments(f"--mode={mode}", "--batch-size=40", "--fanout=3,2")
    feat, labels = np.load(path / "feat.npy"), dict(zip(*arrays(path, "train_set")))
    source, target = np.load(path / "edges.npy")
    edges = set(zip(source.tolist(), target.tolist()))
    batches = 0
    for batch in pipeline(args, load(path), "train_set", is_train=True):
        batches += 1
        seeds = batch.seeds.tolist()
        assert batch.labels.tolist() == [labels[seed] for seed in seeds]
        assert torch.equal(
            batch.node_features["feat"], torch.from_numpy(feat[batch.input_nodes])
        )
        assert [len(batch.blocks), batch.blocks[-1].num_dst_nodes()] == [2, len(seeds)]
        for block, graph, fanout in zip(batch.blocks, batch.sampled_subgraphs, (3, 2)):
            assert block.in_degrees().max() <= fanout
            sources = graph.original_row_node_ids
            targets = graph.original_column_node_ids
            u, v = block.edges()
            sampled = zip(sources[u.long()].tolist(), targets[v.long()].tolist())
            assert set(sampled) <= edges
    return batches


@pytest.mark.parametrize("mode", ["cpu-cpu", "pinned-cuda", "cuda-cuda"])
def test_mini_batches_hold_the_right_labels_features_and_neighbours(
    in_ranks, tiny, mode
):
    assert in_ranks(2, collect, tiny, mode) == [3, 3]  # 300 // (40 × 2)


def stages(args, monkeypatch, *, device="cuda:0", **stand_ins):
    """Return the stages that create_dataloader() chains, with their arguments."""
    chain = []

    class Pipe:
        def __getattr__(self, stage):
            def record(*positional, **named):
                chain.append((stage, positional[1:], named))
                return self

            if stage.startswith("_"):
                raise AttributeError(stage)
            return record

    def sampler(*_, **named):
        chain.append(("sampler", (), named))
        return Pipe()

    def dataloader(_, **named):
        chain.append(("dataloader", (), named))
        return argparse.Namespace()

    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(nc.gb, name, stand_in)
    sampler.__signature__ = inspect.signature(stand_ins["DistributedItemSampler"])
    dataloader.__signature__ = inspect.signature(stand_ins["DataLoader"])
    monkeypatch.setattr(nc.gb, "DistributedItemSampler", sampler)
    monkeypatch.setattr(nc.gb, "DataLoader", dataloader)
    monkeypatch.setattr(nc.dist, "get_world_size", lambda: 2)
    itemset = gb.ItemSet((torch.arange(9), torch.arange(9)), names=("seeds", "labels"))
    nc.create_dataloader(args, None, None, itemset, torch.device(device), True)
    return chain


def signatures(sampler, copy, neighbours, dataloader):
    """Make stand-ins for GraphBolt's classes from the arguments that they take."""
    named = {
        "DistributedItemSampler": sampler,
        "CopyTo": copy,
        "NeighborSampler": neighbours,
        "DataLoader": dataloader,
    }
    made = {}
    for name, taken in named.items():
        scope = {}
        exec(f"def f(datapipe, {taken}): pass", scope)  # noqa: S102
        made[name] = scope["f"]
    return made


SAMPLER = "batch_size, shuffle=False, drop_last=False, drop_uneven_inputs=False"
DGL_2_1 = (
    SAMPLER,
    "device, extra_attrs=None",
    "graph, fanouts",
    "num_workers=0, overlap_feature_fetch=True, overlap_graph_fetch=False",
)
DGL_2_2 = (
    SAMPLER,
    "device",
    "graph, fanouts",
    "num_workers=0, overlap_feature_fetch=True, overlap_graph_fetch=False",
)
DGL_2_3 = (SAMPLER + ", seed=None", *DGL_2_2[1:])
DGL_2_4 = (
    SAMPLER + ", seed=None",
    "device",
    "graph, fanouts, overlap_fetch=False, asynchronous=False",
    "num_workers=0, overlap_feature_fetch=True",
)


@pytest.mark.parametrize(
    ("version", "optional"),
    [
        (DGL_2_1, {"extra_attrs": ["seeds"], "overlap_graph_fetch": True}),
        (DGL_2_2, {"overlap_graph_fetch": True}),
        (DGL_2_3, {"overlap_graph_fetch": True, "seed": 5}),
        (DGL_2_4, {"overlap_fetch": True, "asynchronous": True, "seed": 5}),
    ],
    ids=["2.1.0", "2.2.1", "2.3.0", "2.4.0"],
)
def test_each_dgl_version_gets_the_arguments_it_knows(monkeypatch, version, optional):
    args = arguments("--mode=pinned-cuda", "--seed=5")
    chain = stages(args, monkeypatch, **signatures(*version))
    assert [stage for stage, _, _ in chain] == [
        "sampler",
        "copy_to",
        "sample_neighbor",
        "fetch_feature",
        "dataloader",
    ]
    passed = {k: v for _, _, named in chain for k, v in named.items()}
    assert passed.pop("overlap_feature_fetch") is True
    always = {
        "batch_size",
        "shuffle",
        "drop_last",
        "drop_uneven_inputs",
        "node_feature_keys",
        "num_workers",
    }
    assert {k: v for k, v in passed.items() if k not in always} == optional


@pytest.mark.parametrize(
    ("flags", "device", "order"),
    [
        (
            ["--mode=cuda-cuda"],
            "cuda:0",
            ["copy_to", "sample_neighbor", "fetch_feature"],
        ),
        (
            ["--mode=pinned-cuda"],
            "cuda:0",
            ["copy_to", "sample_neighbor", "fetch_feature"],
        ),
        (
            ["--mode=cpu-cuda"],
            "cuda:0",
            ["sample_neighbor", "fetch_feature", "copy_to"],
        ),
        (["--mode=cpu-cpu"], "cpu", ["sample_neighbor", "fetch_feature"]),
        (
            ["--mode=cpu-cuda", "--gpu-cache-size=9"],
            "cuda:0",
            ["sample_neighbor", "copy_to", "fetch_feature"],
        ),
    ],
)
def test_the_copy_stands_where_the_mode_needs_it(monkeypatch, flags, device, order):
    chain = stages(
        arguments(*flags), monkeypatch, device=device, **signatures(*DGL_2_1)
    )
    assert [stage for stage, _, _ in chain] == ["sampler", *order, "dataloader"]


class ByRows:
    def __init__(self, fallback_feature, cache_size):
        self.size = cache_size


class ByBytes:
    def __init__(self, fallback_feature, max_cache_size_in_bytes):
        self.size = max_cache_size_in_bytes


@pytest.mark.parametrize(
    ("stand_in", "size"), [(ByRows, 1000 // 32), (ByBytes, 1000)], ids=["2.1", "2.2"]
)
def test_the_gpu_cache_is_sized_in_what_the_version_counts(monkeypatch, stand_in, size):
    monkeypatch.setattr(nc.gb, "GPUCachedFeature", stand_in)
    feature = gb.TorchBasedFeature(torch.zeros(5, 8))  # 32 bytes a row
    assert nc.gpu_cached(feature, 1000).size == size


def test_the_gpu_cache_of_dgl_2_4_is_made_by_its_function(monkeypatch):
    made = lambda feature, size: (feature, size)
    monkeypatch.setattr(nc.gb, "gpu_cached_feature", made, raising=False)
    assert nc.gpu_cached("feature", 1000) == ("feature", 1000)


@pytest.fixture
def sped_up(monkeypatch):
    """DGL 2.1's slow functions replaced, for a graph of 1,000 nodes."""
    store, sampler = gb.impl.torch_based_feature_store, gb.impl.neighbor_sampler
    if not nc.dgl.__version__.startswith("2.1."):
        pytest.skip(f"dgl {nc.dgl.__version__} is left as it is")
    old = sampler.unique_and_compact_csc_formats
    monkeypatch.setattr(sampler, "unique_and_compact_csc_formats", old)  # undone later
    monkeypatch.setattr(store, "index_select", store.index_select)
    nc.speed_up_cpu(1000)
    assert sampler.unique_and_compact_csc_formats is not old
    return store.index_select, sampler.unique_and_compact_csc_formats


def test_the_feature_store_reads_the_rows_asked_for(sped_up):
    rows = torch.arange(12.0).reshape(4, 3)
    feature = gb.TorchBasedFeature(rows)
    asked = torch.tensor([3, 0], dtype=torch.int32)
    assert torch.equal(feature.read(asked), rows[[3, 0]])
    assert torch.equal(sped_up[0](rows, asked), rows[[3, 0]])
    assert torch.equal(feature.read(), rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_edges", [0, 1, 5000])
def test_renumbered_neighbours_are_the_same_nodes_seeds_first(
    sped_up, dtype, num_edges
):
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # the table is used again
        seeds = torch.randperm(1000, generator=generator)[:100].to(dtype)
        ids = torch.randint(1000, (num_edges,), generator=generator).to(dtype)
        indptr = torch.arange(101) * num_edges // 100
        csc = gb.CSCFormatBase(indptr=indptr, indices=ids)
        nodes, compacted = sped_up[1](csc, seeds)
        assert nodes.dtype == dtype
        assert torch.equal(nodes[:100], seeds)
        assert set(nodes.tolist()) == set(seeds.tolist()) | set(ids.tolist())
        assert len(set(nodes.tolist())) == len(nodes)
        assert torch.equal(nodes[compacted.indices.long()], ids)
        assert torch.equal(compacted.indptr, indptr)
