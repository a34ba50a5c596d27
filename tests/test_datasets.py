"""A dataset that cannot be trained on costs one line; whatever can is accepted."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SCRIPT, arguments, environment, gb, load, nc, run_script
from dgl.graphbolt.internal import calculate_dir_hash
from torch.utils._python_dispatch import TorchDispatchMode

RUN = ("--mode=cpu-cpu", "--batch-size=100", "--fanout=3")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A dataset that GraphBolt has not preprocessed: 300 of 600 nodes to train."""
    path = tmp_path_factory.mktemp("raw") / "raw"
    nc.write_synthetic(path, nodes=600, edges=6000, width=8, classes=4)
    return path


@pytest.fixture
def data(raw, tmp_path):
    """A copy to change, with room around it."""
    return Path(shutil.copytree(raw, tmp_path / "data"))


def opened(name, ranks=1, batch=100) -> gb.OnDiskDataset:
    args = arguments(f"--dataset={name}", f"--batch-size={batch}")
    return nc.load_dataset(args, ranks)


def refusal(name, ranks=1, batch=100) -> str:
    """Return the line with which the run ends, by way of standard error, status 1."""
    with pytest.raises(SystemExit) as end:
        opened(name, ranks, batch)
    assert isinstance(end.value.code, str)
    assert "\n" not in end.value.code
    return end.value.code


# Each of these returns a function that changes the dataset in a folder.


def layout(change):
    def damage(path):
        content = json.loads((path / "metadata.yaml").read_text())
        change(content)
        (path / "metadata.yaml").write_text(json.dumps(content))

    return damage


def task(change):
    return layout(lambda content: change(content["tasks"][0]))


def train_set(change):
    return task(lambda task: change(task["train_set"][0]))


def array(name, change):
    def damage(path):
        np.save(path / f"{name}.npy", change(np.load(path / f"{name}.npy")))

    return damage


def seeds(change, name="train_set"):
    return array(f"{name}_seeds", change)


def labels(change, name="train_set"):
    return array(f"{name}_labels", change)


def prepared(name, change):
    """Change a file that GraphBolt has made, so that it does not make it again."""

    def damage(path):
        load(path)
        change(path / "preprocessed" / name)
        hashes = path / "preprocessed/dataset_hash_value.txt"
        hashes.unlink()
        hashes.write_text(json.dumps(calculate_dir_hash(str(path))))

    return damage


def graph(field, index, value):
    def change(file):
        graph = torch.load(file)
        tensor = getattr(graph, field).clone()
        tensor[index] = value
        setattr(graph, field, tensor)
        torch.save(graph, file)

    return prepared("fused_csc_sampling_graph.pt", change)


# These are the changes.


def first(value, kind=np.int64):
    return lambda values: np.append(np.array(value, kind), values[1:])


def truncate(file):
    file.write_bytes(file.read_bytes()[:-64])


def flatten(file):
    np.save(file, np.load(file)[:, 0])


def two_node_types(content):
    content["graph"]["nodes"] = [{"type": kind, "num": 300} for kind in ("a", "b")]
    content["graph"]["edges"][0]["type"] = "a:to:a"


DAMAGES = {  # and what the message must contain
    # Whatever GraphBolt cannot read
    "no metadata": (lambda path: (path / "metadata.yaml").unlink(), "metadata.yaml"),
    "broken YAML": (
        lambda path: (path / "metadata.yaml").write_text("a: [1,"),
        "line 1",
    ),
    "empty YAML": (lambda path: (path / "metadata.yaml").write_text(""), "read"),
    "no array": (lambda path: (path / "feat.npy").unlink(), "feat.npy"),
    "half an array": (lambda path: truncate(path / "feat.npy"), "read"),
    "half a graph": (prepared("fused_csc_sampling_graph.pt", truncate), "read"),
    "text in an array": (array("feat", lambda feat: feat.astype(str)), "numpy.str_"),
    "1-D features": (prepared("feat.npy", flatten), "1 dimension"),
    "no graph": (layout(lambda content: content.pop("graph")), "graph"),
    # The graph
    "two node types": (layout(two_node_types), "homogeneous"),
    "edge beyond": (graph("indices", 0, 600), "600 nodes"),
    "negative edge": (graph("indices", -1, -1), "600 nodes"),
    "edges out of bounds": (graph("csc_indptr", -1, 7000), "600 nodes"),
    "edges out of order": (graph("csc_indptr", 300, 6000), "600 nodes"),
    # The features
    "no features": (layout(lambda content: content.pop("feature_data")), "feature"),
    "a feature of a node type": (
        layout(lambda content: content["feature_data"][0].update(type="a")),
        "feature",
    ),
    "too few rows": (array("feat", lambda feat: feat[:-1]), "600"),
    "3-D features": (array("feat", lambda feat: feat[:, None]), "feat"),
    "no columns": (array("feat", lambda feat: feat[:, :0]), "feat"),
    # The task
    "no tasks": (layout(lambda content: content.pop("tasks")), "task"),
    "no classes": (task(lambda task: task.pop("num_classes")), "num_classes"),
    "text for a number": (task(lambda task: task.update(num_classes="4")), "classes"),
    # The sets
    "wrong field": (train_set(lambda one: one["data"][1].update(name="y")), "labels"),
    "seeds alone": (train_set(lambda one: one["data"].pop()), "labels"),
    "no fields": (train_set(lambda one: one.update(data=[])), ""),
    "a set of a node type": (train_set(lambda one: one.update(type="a")), "train_set"),
    "a seed beyond": (seeds(first(600)), "train_set"),
    "a seed far beyond": (seeds(first(2**32)), "train_set"),
    "negative seed": (seeds(first(-1), "test_set"), "test_set"),
    "a seed twice": (seeds(lambda ids: np.append(ids[1], ids[1:])), "train_set"),
    "pairs of seeds": (seeds(lambda ids: ids.reshape(-1, 2)), "train_set"),
    "a single seed": (seeds(lambda ids: ids[0]), ""),
    "label NaN": (labels(first(np.nan, float)), "0 to 3"),
    "infinite label": (labels(first(np.inf, float)), "0 to 3"),
    "half a label": (labels(first(0.5, float)), "0 to 3"),
    "negative label": (labels(first(-1), "validation_set"), "validation_set"),
    "label too high": (labels(first(4), "test_set"), "test_set"),
    "too few labels": (labels(lambda ids: ids[:-1]), "train_set"),
    "too many labels": (labels(lambda ids: np.append(ids, 0)), "train_set"),
    "one-hot labels": (labels(lambda ids: np.eye(4)[ids]), "train_set"),
    "labels in a row": (labels(lambda ids: ids[None]), "train_set"),
    "a single label": (labels(lambda ids: ids[0]), ""),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_dataset_is_refused_by_name_and_cause(data, kind):
    damage, words = DAMAGES[kind]
    damage(data)
    line = refusal(data)
    assert f"--dataset={data}" in line
    assert words in line.replace(str(data), "")


def test_an_edge_to_no_node_costs_a_line_and_not_the_process(data):
    array("edges", lambda ends: np.hstack([ends, [[0], [10**7]]]))(data)
    status, _, errors = run_script(f"--dataset={data}", *RUN, cwd=data)
    assert status == 1
    assert errors.startswith(f"error: --dataset={data}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("name", ["", "ogbn-product", "no/such/folder", "long" * 99])
def test_a_name_that_is_no_dataset_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert f"--dataset={name}: " in refusal(name)
    assert not os.listdir()


def test_a_file_in_place_of_a_folder_is_refused(data):
    assert f"--dataset={data}/feat.npy: " in refusal(data / "feat.npy")


@pytest.mark.parametrize("lacking", ["metadata.yaml", "feat.npy", "edges.npy"])
def test_half_a_download_names_the_folder_to_delete(
    data, tmp_path, monkeypatch, lacking
):
    (data / lacking).unlink()
    (tmp_path / "datasets").mkdir()
    data.rename(tmp_path / "datasets/ogbn-products")
    monkeypatch.chdir(tmp_path)
    assert "delete datasets/ogbn-products" in refusal("ogbn-products")


def test_without_network_a_download_ends_in_one_line_within_seconds(tmp_path):
    nowhere = "http://127.0.0.1:9"  # the discard port, where nothing listens
    proxies = {"https_proxy": nowhere, "no_proxy": "", "NO_PROXY": ""}
    start = time.monotonic()
    status, output, errors = run_script("--mode=cpu-cpu", cwd=tmp_path, **proxies)
    assert status != 0
    assert output == ""
    assert errors.count("\n") == 1
    assert "ogbn-products" in errors
    assert "network" in errors
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    "epochs, absent",
    [(1, ("validation_set", "test_set")), (0, ("train_set", "validation_set"))],
)
def test_a_run_goes_on_without_a_set_and_says_so(data, forked, epochs, absent):
    task(lambda task: [task.pop(name) for name in absent])(data)
    output = forked(f"--dataset={data}", f"--epochs={epochs}", *RUN)
    for name in absent:
        assert re.search(rf"\b0 (in )?{name.partition('_')[0]}", output)
    assert output.count("\nEpoch ") == epochs
    assert ("Test Accuracy" in output) == ("test_set" not in absent)


@pytest.mark.parametrize("ranks, largest", [(1, 300), (2, 150), (7, 42)])
def test_too_large_a_batch_is_refused_with_the_largest_that_fits(data, ranks, largest):
    line = refusal(data, ranks, largest + 1)
    assert "--batch-size" in line
    assert re.search(rf"\b{largest}\b", line.replace(f"={largest + 1}", ""))
    opened(data, ranks, largest)


def test_without_a_training_set_there_is_only_testing(data):
    task(lambda task: task.pop("train_set"))(data)
    assert "--batch-size" in refusal(data, batch=1)
    nc.load_dataset(arguments(f"--dataset={data}", "--epochs=0"), 1)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "int32", "float64"])
def test_labels_of_any_type_are_accepted(data, kind):
    labels(lambda ids: ids.astype(kind))(data)
    assert str(opened(data).tasks[0].train_set[:][1].dtype) == f"torch.{kind}"


def test_labels_in_a_column_are_accepted(data):
    labels(lambda ids: ids[:, None])(data)
    assert opened(data).tasks[0].train_set[:][1].shape == (300, 1)


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_features_of_another_precision_are_accepted(data, kind):
    array("feat", lambda feat: feat.astype(kind))(data)
    feat = opened(data).feature.read("node", None, "feat")
    assert str(feat.dtype) == f"torch.{kind}"


def test_too_little_shared_memory_is_refused_with_the_remedy(tmp_path, monkeypatch):
    """What the ranks share here is mostly seeds and labels."""
    nc.write_synthetic(tmp_path / "data", nodes=150_000, edges=150_000, width=1)
    dataset = load(tmp_path / "data")
    shared = [dataset.graph.csc_indptr, dataset.graph.indices]
    shared += [dataset.feature.read("node", None, "feat")]
    for name in nc.SETS:
        shared += getattr(dataset.tasks[0], name)[:]
    size = sum(tensor.nbytes for tensor in shared)
    room = SimpleNamespace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    line = refusal(tmp_path / "data")
    assert "/dev/shm" in line
    assert "--ipc=host" in line
    assert "--shm-size" in line
    room.free = 2 * size
    opened(tmp_path / "data")


def test_a_small_dev_shm_is_refused_before_it_kills_the_process(data):
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    try:
        subprocess.run([*alone, "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount of one's own is allowed here: {error}")
    done = subprocess.run(
        [*alone, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, SCRIPT]
        + [f"--dataset={data}", *RUN],
        check=False,
        cwd=data,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--shm-size" in done.stderr


class LargestResult(TorchDispatchMode):
    """Remembers the largest number of elements that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_check_of_20_million_edges_is_quick_and_copies_no_feature(monkeypatch):
    nodes, edges = 10**6, 2 * 10**7
    ends = torch.arange(nodes + 1) * (edges // nodes)
    graph = gb.fused_csc_sampling_graph(ends, torch.randint(nodes, (edges,)).int())
    feature = gb.TorchBasedFeature(torch.empty(nodes, 64))  # takes no memory yet
    store = gb.BasicFeatureStore({("node", None, "feat"): feature})
    items = (torch.arange(5000), torch.zeros(5000, dtype=torch.int64))
    task = SimpleNamespace(
        metadata={"num_classes": 2},
        train_set=gb.ItemSet(items, names=("seeds", "labels")),
        validation_set=None,
        test_set=None,
    )
    dataset = SimpleNamespace(graph=graph, feature=store, tasks=[task])
    room = SimpleNamespace(free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    start = time.perf_counter()
    with LargestResult() as largest:
        nc.check_dataset(dataset, arguments(), 4)
    assert time.perf_counter() - start < 2
    assert 0 < largest.numel < feature.read().numel()
