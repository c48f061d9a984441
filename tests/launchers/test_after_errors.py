"""After an error that the script has caught, the same module trains again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers.cases import slow
from tests.helpers.observed import make_data, make_module, make_trainer
from tests.helpers.scripts import run_script

SCRIPT = """
import copy, sys
from pathlib import Path

import torch
from lightning.fabric.strategies.launchers import subprocess_script
from tests.helpers.observed import make_data, make_module
from tests.helpers.trainers import quiet_trainer

torch.set_num_threads(1)
place, num_chunks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
error = KeyError("pruned")
if "Ctrl+C" in sys.argv[4]:
    error = KeyboardInterrupt()
    # It looks every five seconds, and kills this process once the others are gone.
    subprocess_script._ChildProcessObserver.run = lambda self: None
on_rank = 1 if "rank 1" in sys.argv[4] else None


def fail(trainer):
    due = trainer.current_epoch == 2 and not trainer.sanity_checking
    if due and not module.has_failed and on_rank in (None, trainer.global_rank):
        raise error


def failing(name, original):
    def run(*args, **kwargs):
        result = original(*args, **kwargs)
        fail(module.trainer)
        return result
    return run


def make_trainer(max_epochs):
    return quiet_trainer(
        2, {"num_chunks": num_chunks, "start_method": "popen"}, max_epochs=max_epochs
    )


def check():
    net, graph = module.net, data.data
    for training in (True, False):
        net.train(training), torch.manual_seed(3)
        twin = copy.deepcopy(net)
        expected = twin(graph.x, graph.edge_index)
        torch.manual_seed(3)
        torch.testing.assert_close(net(graph.x, graph.edge_index), expected)
    assert all(tensor.numel() for tensor in module.state_dict().values())


if __name__ == "__main__":
    data, module = make_data(), make_module()
    module.has_failed = False
    setattr(module, place, failing(place, getattr(module, place)))
    trainer = make_trainer(9)
    try:
        trainer.fit(module, data)
    except (Exception, SystemExit) as caught:
        print("caught", type(caught).__name__)
    module.has_failed = True
    check()
    if "other" in sys.argv[4]:
        trainer = make_trainer(4)
    trainer.fit(module, data)
    ranks = [None, None]
    torch.distributed.all_gather_object(ranks, trainer.global_rank)
    assert ranks == [0, 1] and trainer.current_epoch == trainer.max_epochs
    check()
    torch.save(module.state_dict(), folder / f"{trainer.global_rank}.pt")
"""


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("place", "num_chunks", "how"),
    [
        ("on_validation_end", 1, "all ranks, the same Trainer"),
        ("validation_step", 4, "rank 1, other Trainer"),
        slow("training_step", 4, "all ranks, other Trainer"),
        slow("training_step", 4, "all ranks, the same Trainer"),
        slow("on_train_batch_end", 1, "rank 1, the same Trainer"),
        slow("on_after_backward", 4, "all ranks, the same Trainer"),
    ],
)
def test_the_module_trains_again_on_two_devices(
    place: str, num_chunks: int, how: str, tmp_path: Path
) -> None:
    script = run_script(tmp_path, SCRIPT, place, num_chunks, tmp_path, how)
    assert script.text.count("caught") == 2
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("which", ["the same Trainer", slow("another Trainer")])
def test_after_ctrl_c_there_are_no_ranks_to_train_on(which: str, tmp_path: Path) -> None:
    how = f"Ctrl+C, {which}"
    script = run_script(tmp_path, SCRIPT, "on_train_batch_end", 4, tmp_path, how, fails=True)
    assert "none, since Ctrl+C has ended them" in script.text, script.text[-3000:]
    assert script.text.count("Detected KeyboardInterrupt") == 1
    assert "Rank " not in script.text, script.text[-3000:]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), KeyError("pruned")])
def test_the_module_trains_again_on_one_device(error: BaseException) -> None:
    def fail(trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            raise error

    module, data, handler = make_module(), make_data(), signal.getsignal(signal.SIGINT)
    trainer = make_trainer(1, 4, LambdaCallback(on_train_batch_end=fail))
    with pytest.raises((SystemExit, KeyError)):
        trainer.fit(module, data)
    signal.signal(signal.SIGINT, handler)  # which Lightning ignores from then on
    assert "forward" not in vars(module.net)
    again = make_trainer(1, 4)
    again.fit(module, data)
    assert again.current_epoch == 3
