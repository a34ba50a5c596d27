"""Training: replicas stay equal, seeds repeat a run, any dtype trains, output is clean."""

import os
import pty
import re
import sys

import pytest
import torch
from conftest import (
    SCRIPT,
    arguments,
    arrays,
    epochs,
    full_graph_logits,
    load,
    pipeline,
    results,
    run_script,
)
from dgl import graphbolt as gb
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import node_classification as nc

CPU = torch.device("cpu")


def train_in_order(rank, path, order, *flags, dropout=0.0, dataset=None):
    """Train on the training items in the given order; return the parameters."""
    dataset = dataset or load(path)
    seeds, labels = dataset.tasks[0].train_set[:]
    names = dataset.tasks[0].train_set.names
    itemset = gb.ItemSet((seeds[order], labels[order]), names=names)
    dataset.tasks[0]._train_set = itemset
    args = arguments("--fanout=-1,-1", *flags)
    torch.manual_seed(0)
    model = DistributedDataParallel(nc.SAGE(8, 16, 4, 2))
    model.module.dropout.p = dropout
    loader = pipeline(args, dataset, "train_set", is_train=False)  # not shuffled
    nc.train(rank, args, loader, [], 4, model, CPU)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_two_ranks_of_a_batch_follow_one_rank_of_the_double(in_ranks, tiny):
    flags = ("--epochs=3", "--lr=0.01")
    items = torch.arange(300)
    two = in_ranks(2, train_in_order, tiny, items, "--batch-size=50", *flags)
    # Rank 0 has the first 150 items and rank 1 the others: pair their batches.
    paired = items.reshape(2, 3, 50).transpose(0, 1).flatten()
    (one,) = in_ranks(1, train_in_order, tiny, paired, "--batch-size=100", *flags)
    start = train_in_order_start()
    assert torch.allclose(two[0], one, atol=1e-5)
    assert (one - start).abs().max() > 0.01  # it did train


def train_in_order_start():
    torch.manual_seed(0)
    return nn.utils.parameters_to_vector(nc.SAGE(8, 16, 4, 2).parameters()).detach()


@pytest.mark.parametrize(
    ("world_size", "batch_size"),
    [(2, 100), (3, 200)],
    ids=["2 batches and 1", "1 batch, 1 and none"],
)
def test_join_ends_with_equal_replicas_when_batches_are_uneven(
    in_ranks, tiny, world_size, batch_size
):
    flags = (f"--batch-size={batch_size}", "--epochs=2", "--lr=0.01")
    replicas = in_ranks(world_size, train_in_order, tiny, torch.arange(300), *flags)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert not torch.equal(replicas[0], train_in_order_start())


def test_the_printed_loss_is_the_mean_over_all_items_of_all_ranks(
    in_ranks, tiny, capfd
):
    flags = ("--batch-size=110", "--epochs=1", "--lr=1e-30")  # 110, 110 and 80 items
    in_ranks(3, train_in_order, tiny, torch.arange(300), *flags)
    (printed,) = epochs(capfd.readouterr().out)
    x = full_graph_logits(tiny, num_layers=2)
    seeds, labels = arrays(tiny, "train_set")
    loss = nn.functional.cross_entropy(x[seeds], torch.from_numpy(labels))
    assert printed["Average Loss"] == pytest.approx(loss.item(), abs=1e-4)


def draw(rank, path):
    nc.seed_rank(0, 0, rank)
    graph = load(path).graph
    neighbours = graph.sample_neighbors(torch.arange(50).int(), torch.tensor([2]))
    return neighbours.sampled_csc.indices.tolist(), torch.rand(4).tolist()


def test_ranks_draw_their_own_neighbours_and_dropout_and_repeat_them(in_ranks, tiny):
    (sampled, dropped), (other_sampled, other_dropped) = in_ranks(2, draw, tiny)
    assert sampled != other_sampled
    assert dropped != other_dropped
    assert in_ranks(2, draw, tiny)[1] == (other_sampled, other_dropped)


def test_the_seed_repeats_a_run_and_another_seed_does_not(forked):
    outputs = [forked("--epochs=2", f"--seed={seed}") for seed in (7, 7, 8)]
    first, again, other = map(results, outputs)
    assert len(first) == 3
    assert first == again
    assert all(line not in first for line in other[:2])


@pytest.mark.parametrize("kind", ["float16", "float64", "int8", "int32", "column"])
def test_any_dtype_and_label_shape_trains_like_float32_and_int64(in_ranks, tiny, kind):
    def converted():
        dataset = load(tiny)
        task = dataset.tasks[0]
        seeds, labels = task.train_set[:]
        feat = dataset.feature.read("node", None, "feat").half().float()
        if kind.startswith("float"):
            feat = feat.to(getattr(torch, kind))
        elif kind.startswith("int"):
            labels = labels.to(getattr(torch, kind))
        else:
            labels = labels.reshape(-1, 1)
        task._train_set = gb.ItemSet((seeds, labels), names=task.train_set.names)
        dataset.feature._features = {("node", None, "feat"): gb.TorchBasedFeature(feat)}
        return dataset

    def trained(rank, convert):
        dataset = converted() if convert else load(tiny)
        if not convert:
            exact = dataset.feature.read("node", None, "feat").half().float()
            exact = gb.TorchBasedFeature(exact)
            dataset.feature._features = {("node", None, "feat"): exact}
        flags = ("--batch-size=100", "--epochs=1")
        items = torch.arange(300)
        return train_in_order(rank, tiny, items, *flags, dataset=dataset)

    plain, other = in_ranks(1, trained, False)[0], in_ranks(1, trained, True)[0]
    assert torch.equal(plain, other)


EPOCH = re.compile(
    r"Epoch \d{5} \| Average Loss \d+\.\d{4} \| Accuracy [01]\.\d{4} \| "
    r"Time \d+\.\d{4} \| Train \d+\.\d{4} \| Seeds/s \d+"
)


def test_rank_0_alone_prints_and_no_bar_goes_into_a_pipe(tiny):
    flags = (f"--dataset={tiny}", "--gpu=0,1", "--batch-size=50", "--epochs=2")
    status, output, errors = run_script(*flags, cwd=tiny)
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    facts = [line.partition(":")[0] for line in lines[:-3]]
    assert lines[0].startswith("Running on the CPU")
    assert len(facts) == len(set(facts))  # no rank repeats another's
    assert {"Processes", "Devices", "Backend", "Mode", "Dataset"} <= set(facts)
    assert "600 nodes, 6,000 edges" in output
    assert "Split: 300 train, 150 validation, 150 test" in output
    assert all(EPOCH.fullmatch(line) for line in lines[-3:-1])
    assert re.fullmatch(r"Test Accuracy [01]\.\d{4}", lines[-1])


def test_a_terminal_sees_a_bar_with_epoch_and_phase(tiny):
    flags = f"--dataset={tiny} --batch-size=50 --epochs=2"
    command = (
        f"stty columns 100 rows 30; OMP_NUM_THREADS=1 {sys.executable} {SCRIPT} {flags}"
    )
    shown = []

    def read(terminal):
        shown.append(os.read(terminal, 4096))
        return shown[-1]

    assert pty.spawn(["sh", "-c", command], read) == 0
    screen = b"".join(shown).decode()
    for phase in ("Epoch 00000 training", "Epoch 00001 validation", "Test"):
        assert re.search(rf"{phase}: \d+it", screen)
