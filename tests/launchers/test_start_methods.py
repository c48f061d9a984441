"""However processes are started, weights come back to the one that called `fit`.

Forks that would use a GPU are refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch_geometric.nn import GCN

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError, GNNPipeError
from lightning_gnnpipe.trainer.processes import ForkLauncher, ScriptLauncher
from tests.helpers.scripts import ROOT, run_script
from tests.test_user_errors import Module, Net, fit, graph

SCRIPT = """
import sys
import torch
from lightning_gnnpipe.models import NodeClassifier
from tests.helpers.observed import fit, make_module


class Late(NodeClassifier):
    '''Makes its layers when the Trainer asks for them.'''

    def __init__(self):
        super().__init__(torch.nn.Identity(), 3)

    def configure_model(self):
        if isinstance(self.net, torch.nn.Identity):
            self.net = make_module(0.1).net


if __name__ == "__main__":
    devices, start_method, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    module = make_module(0.1)
    module = Late() if kind == "late" else module
    for number in (1, devices) if kind == "twice" else (devices,):
        trainer = fit(number, module=module, start_method=start_method)
    if trainer.global_rank == 0:
        total = sum(p.double().sum().item() for p in module.net.parameters())
        print(f"ends with {total:.6f}", flush=True)
"""


def run(tmp_path: Path, num_stages: int, start_method: str, kind: str) -> str:
    text = run_script(tmp_path, SCRIPT, num_stages, start_method, kind, is_new=True).text
    [found] = [line for line in text.splitlines() if line.startswith("ends with")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("plain", ["popen", "fork"]),
        ("late", ["popen"]),  # in forks Lightning makes late layers in them alone
    ],
)
def test_all_ways_of_starting_give_the_same_weights(
    kind: str, ways: list[str], tmp_path: Path
) -> None:
    expected = run(tmp_path, 1, "popen", kind)
    assert [run(tmp_path, 2, way, kind) for way in ways] == [expected] * len(ways)


@pytest.mark.slow
def test_trainers_of_other_numbers_of_devices_in_one_script(tmp_path: Path) -> None:
    """A rank that runs the script from its beginning says so."""
    failed = run_script(tmp_path, SCRIPT, 2, "popen", "twice", is_new=True, fails=True)
    assert "the same number of devices as in the Trainer that started this process" in failed.text
    assert "IndexError" not in failed.text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_forks_that_would_use_a_gpu_are_refused(device: str) -> None:
    strategy = GNNPipeStrategy(start_method="fork")
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device(device, number) for number in range(2)]
    if device == "cuda":
        with pytest.raises(ConfigError, match="import of torch_geometric"):
            strategy._configure_launcher()
    else:
        strategy._configure_launcher()
        assert isinstance(strategy.launcher, ForkLauncher)


class Again(Net):
    """Calls its first layer four times."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for _ in range(4):
            x = self.convs[0](x, edge_index)
        return x


class Started(Exception):
    """A process would have been started."""


def start(launcher: ScriptLauncher) -> None:
    raise Started


@pytest.mark.parametrize(
    ("net", "shards", "kind", "text"),
    [
        (Net(), 1, ConfigError, "got 4 stages and 3 layers.*at most 3 devices"),
        (GCN(4, 4, 3, 4), 1, ConfigError, "got 4 stages and 3 layers"),
        (Net(), 3, ConfigError, "'graph_parallel' to divide the number of processes, 4"),
        (nn.Linear(4, 4), 1, GNNPipeError, "no message-passing layer"),
        (Again(), 1, Started, ""),
    ],
)
def test_what_cannot_run_on_so_many_devices_starts_no_process(
    net: nn.Module, shards: int, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptLauncher, "_call_children_scripts", start)
    with pytest.raises(kind, match=f"(?s){text}"):
        fit(Module(net), graph(), 4, devices=4, graph_parallel=shards)


THREADS = """
from pathlib import Path

import lightning as L
import torch
from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, make_communities
from lightning_gnnpipe.models import NodeClassifier
from torch_geometric.nn import GCNConv, Sequential

seen = []


class Noting(GCNConv):
    def forward(self, x, edge_index):
        seen.append(torch.get_num_threads())
        return super().forward(x, edge_index)


class Says(L.Callback):
    def on_train_end(self, trainer, module):
        text = f"{torch.get_num_threads()} {max(seen)}"  # the first step is exact
        Path(f"threads_{trainer.global_rank}").write_text(text)


layers = [(Noting(64, 64), "x, edge_index -> x"), (Noting(64, 8), "x, edge_index -> x")]
module = NodeClassifier(Sequential("x, edge_index", layers), num_classes=8)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=GNNPipeStrategy(num_chunks=2),
                    callbacks=[Says()], max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(module, FullGraphDataModule(make_communities(200)))
"""


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "1"}])
def test_processes_divide_the_threads(given: dict[str, str], tmp_path: Path) -> None:
    """Exact steps have those of all processes, unless the user has set a number."""
    (tmp_path / "script.py").write_text(THREADS)
    outer = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env = outer | {"PYTHONPATH": str(ROOT), **given}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, timeout=120, check=True)
    found = [(tmp_path / f"threads_{rank}").read_text().split() for rank in range(2)]
    cores = len(os.sched_getaffinity(0))
    own, most = ("1", "1") if given else (str(max(1, cores // 2)), str(cores))
    assert [one for one, _ in found] == [own] * 2
    assert found[1][1] == most  # the other rank has timed layers as well
