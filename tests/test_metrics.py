"""Loss and accuracy are exact over all ranks, however unequal their shares."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import arguments, arrays, full_graph_logits, load, pipeline
from torch import nn

import node_classification as nc

CPU = torch.device("cpu")


def reduce_share(rank, sums, weights):
    tensor, weight = torch.tensor(sums[rank]), torch.tensor(weights[rank])
    return nc.weighted_reduce(tensor, weight).item(), weight.item()


@pytest.mark.parametrize(
    ("sums", "weights", "mean"),
    [
        ([1.0, 6.0, 5.0], [1, 2, 5], 1.5),
        ([3.0, 0.0, 9.0], [2, 0, 4], 2.0),  # a rank without items
        ([0.0, 0.0, 7.0], [0, 0, 2], 3.5),  # only the last rank has any
    ],
)
def test_weighted_reduce_gives_rank_0_the_mean_over_all_items(
    in_ranks, sums, weights, mean
):
    quotient, total = in_ranks(3, reduce_share, sums, weights)[0]
    assert quotient == pytest.approx(mean)
    assert total == sum(weights)


def evaluate_share(rank, path, batch_size):
    args = arguments(f"--batch-size={batch_size}", "--fanout=-1,-1,-1")
    torch.manual_seed(0)
    model = nc.SAGE(8, 16, 4, 3)
    accuracy, num_items = nc.evaluate(rank, model, pipeline(args, load(path)), 4, CPU)
    share = num_items.item()
    total = nc.weighted_reduce((accuracy * num_items).round(), num_items)
    return share, total.item(), num_items.item()


def full_graph_accuracy(path):
    seeds, labels = arrays(path, "test_set")
    predicted = full_graph_logits(path, num_layers=3).argmax(1)[seeds]
    return (predicted == torch.from_numpy(labels)).double().mean().item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [7, 64, 150, 1024])  # 1024: ranks with nothing
def test_evaluation_is_the_same_for_any_number_of_ranks(
    in_ranks, tiny, world_size, batch_size
):
    results = in_ranks(world_size, evaluate_share, tiny, batch_size)
    _, accuracy, counted = results[0]
    assert accuracy == pytest.approx(full_graph_accuracy(tiny), abs=1e-9)
    assert counted == sum(share for share, _, _ in results) == 150
    if batch_size == 1024:
        assert [share for share, _, _ in results] == [150, 0, 0][:world_size]


def test_evaluation_keeps_class_ids_and_no_logits():
    alive = []

    class Model(nn.Module):
        def forward(self, blocks, x):
            gc.collect()
            held = sum(reference() is not None for reference in alive)
            assert held <= 1  # the previous batch's, until its name is used again
            logits = torch.eye(4)[x[:, 0].long()]
            alive.append(weakref.ref(logits))
            return logits

    batch = SimpleNamespace(
        blocks=None,
        node_features={"feat": torch.tensor([[0.0], [1.0], [3.0]])},
        labels=torch.tensor([0, 2, 3]),
    )
    accuracy, num_items = nc.evaluate(0, Model(), [batch] * 3, 4, CPU)
    assert (accuracy.item(), num_items.item()) == (pytest.approx(2 / 3), 9)


def test_evaluation_without_a_set_has_no_items():
    accuracy, num_items = nc.evaluate(0, nn.Identity(), [], 4, CPU)
    assert (accuracy.item(), num_items.item()) == (0, 0)
