"""What every test rests on: one thread, repeatable examples, Triton's interpreter where there is no GPU, and gauges."""

import gc
import os
import signal
import textwrap

import hypothesis
import pytest
import torch
from warm import python

torch.set_num_threads(1)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background jobs: what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels read it when they are defined: none is imported yet
hypothesis.settings.register_profile("topovq", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("topovq")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The group behind a test's name, by which tests are dealt out.

    pytest-xdist 3.8 writes it where pytest 9.2 no longer reads it (pytest-dev/pytest-xdist#1386).
    """
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
        name = f"@{'_'.join(groups)}"
        if groups and hasattr(item, "_id") and not item.nodeid.endswith(name):
            item._id = type(item._id).parse(item.nodeid + name)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage goes through it again."""
    gc.collect()
    gc.freeze()


GAUGE = """
import torch
torch.set_num_threads(1)

def start_gauge():
    global floor
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts anew from what is held now
    floor = peak()

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

def growth():
    return peak() - floor
"""


@pytest.fixture(params=range(3))
def lloyd_step(request):
    """(vectors, codes among them, those codes after one step of scikit-learn's K-means), float64."""
    from sklearn.cluster import KMeans

    generator = torch.Generator().manual_seed(request.param)
    x = torch.randn(300, 4, generator=generator, dtype=torch.float64) + 2
    codes = x[torch.randperm(300, generator=generator)[:12]]  # codes among the data: no cluster is empty
    kmeans = KMeans(12, init=codes.numpy(), n_init=1, max_iter=1, algorithm="lloyd").fit(x.numpy())
    return x, codes, torch.from_numpy(kmeans.cluster_centers_)


@pytest.fixture
def run_with_gauge():
    """Run Python code in a process of its own; `growth()` there is the peak of resident MiB since `start_gauge()`."""
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("peak memory is read from Linux's /proc")

    def run(code: str) -> None:
        process = python("-c", GAUGE + textwrap.dedent(code))
        assert process.returncode == 0, process.stderr

    return run
