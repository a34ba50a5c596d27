"""Packages that do not fit each other cost one message with the line to run."""

import re
import textwrap

import pytest
from conftest import run_script

# Python runs sitecustomize.py of the first folder on its path before the script.
MISSING = """
    import sys
    from importlib.metadata import Distribution

    class Finder:
        def find_spec(name, path=None, target=None):
            if name == {module!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Finder)
    found = Distribution.discover
    Distribution.discover = lambda **which: (
        each for each in found(**which) if each.metadata["Name"] != {module!r}
    )
"""
OTHER_TORCH = """
    import torch

    torch.__version__ = "2.9.9"
"""
NUMPY_2 = """
    import builtins
    import sys
    import torch

    def imported(name, *args, real=builtins.__import__):
        if name == "dgl.sparse":
            print("Traceback (most recent call last):", file=sys.stderr)
        return real(name, *args)

    def from_numpy(array):
        raise RuntimeError("Numpy is not available")

    torch.from_numpy = from_numpy
    builtins.__import__ = imported
"""


def message(folder, customize="") -> str:
    """Return what the user reads; the folder comes before the installed packages."""
    (folder / "sitecustomize.py").write_text(textwrap.dedent(customize))
    status, output, errors = run_script("--help", cwd=folder, PYTHONPATH=str(folder))
    assert status != 0
    assert output == ""
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    assert "fits: torch 2.2.1, dgl 2.1.0, torchdata 0.7.1, numpy<2" in errors
    assert errors.endswith("run: pip install -r requirements.txt\n")
    return errors


@pytest.mark.parametrize("module", ["pandas", "torchmetrics"])
def test_a_missing_package_is_named_and_not_called_installed(tmp_path, module):
    errors = message(tmp_path, MISSING.format(module=module))
    assert module in errors.splitlines()[0]
    assert not re.search(rf"{module} \d", errors)


def test_a_torch_without_a_graphbolt_library_is_named_with_its_version(tmp_path):
    """As it happens: a newer torch is installed before the one that fits."""
    metadata = tmp_path / "torch-2.9.9.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.9\n")
    problem, installed, *_ = message(tmp_path, OTHER_TORCH).splitlines()
    assert "graphbolt" in problem
    assert "torch 2.9.9" in installed


def test_a_torchdata_without_datapipes_is_named(tmp_path):
    (tmp_path / "torchdata").mkdir()
    (tmp_path / "torchdata/__init__.py").touch()
    problem, installed, *_ = message(tmp_path).splitlines()
    assert "torchdata.datapipes" in problem
    assert "torchdata 0." in installed


def test_a_numpy_that_torch_cannot_use_is_named_without_its_own_traceback(tmp_path):
    problem, installed, *_ = message(tmp_path, NUMPY_2).splitlines()
    assert "Numpy" in problem
    assert "numpy 1." in installed
