"""The CUDA path: NCCL, the three CUDA modes, the GPU cache."""

import dgl
import pytest
import torch
from conftest import epochs, run_script

GPUS = torch.cuda.device_count()
CUDA_DGL = dgl._ffi.function.get_global_func("device_api.cuda", allow_missing=True)
pytestmark = pytest.mark.skipif(
    GPUS == 0 or CUDA_DGL is None,
    reason=f"needs a GPU and a CUDA build of DGL: {GPUS} GPUs, dgl {dgl.__version__}",
)


@pytest.mark.parametrize(
    "flags",
    [
        ["--mode=pinned-cuda"],
        ["--mode=cuda-cuda"],
        ["--mode=cpu-cuda"],
        ["--mode=cpu-cuda", "--num-workers=2"],
        ["--mode=pinned-cuda", "--gpu-cache-size=1000000"],
        ["--mode=cpu-cuda", "--gpu-cache-size=1000000"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_cuda_mode_trains(folder, flags, ranks):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, there are {GPUS}")
    gpus = ",".join(map(str, range(ranks)))
    status, output, errors = run_script(
        f"--gpu={gpus}", "--dataset=synthetic", "--epochs=4", *flags, cwd=folder
    )
    assert (status, errors) == (0, "")
    assert "Backend: nccl" in output
    assert epochs(output)[-1]["Accuracy"] > 0.85
    assert float(output.split()[-1]) > 0.85
