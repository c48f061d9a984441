"""`gnnpipe plan`, and the documented script with LightningCLI, run as a user runs them."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import docstring_parser
import pytest

import lightning_gnnpipe
from gnnpipe import main
from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup, cli, models
from tests.docs.pages import read_blocks
from tests.helpers.scripts import ROOT, start_script

CONFIGS = ROOT / "examples" / "configs"


class Commands:
    """Runs `gnnpipe` in a folder, in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))

    def __call__(self, *arguments: str) -> tuple[Any, str, str]:
        """Return the status, and what it has printed to both streams."""
        self.monkeypatch.setattr(sys, "argv", ["gnnpipe", *arguments])
        try:
            status: Any = main()
        except SystemExit as done:
            status = done.code
        return (status, *self.capsys.readouterr())

    def shows(self, *arguments: str) -> str:
        """Return what a command prints that goes well."""
        status, printed, _ = self(*arguments)
        assert status == 0
        return printed


@pytest.fixture
def gnnpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Commands:
    """In a folder with the example configs, the user's own network beside them."""
    for path in CONFIGS.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return Commands(tmp_path, monkeypatch, capsys)


def test_the_documented_script_trains_and_tests_by_one_config(tmp_path: Path) -> None:
    """By two processes, then one, with a network of the user's."""
    [script] = [one for one in read_blocks("docs/command-line.md") if one.title == "main.py"]
    for name in ("own_net.yaml", "own_net.py"):
        shutil.copy(CONFIGS / name, tmp_path)
    path = tmp_path / "main.py"
    here = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, os.getcwd())\n"
    path.write_text(here + script.text)
    quiet = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
    done = start_script(
        path, "fit", "--config=own_net.yaml", "--trainer.max_epochs=2", *quiet, is_new=False
    )
    done.end(180)
    assert done.returncode == 0, done.text
    assert "Starting with 2 processes" in done.text
    assert done.text.count("LeafSpec)` is deprecated") <= 1 and "sync_dist=True" not in done.text
    [checkpoint] = tmp_path.rglob("*.ckpt")
    options = ("--config=own_net.yaml", f"--ckpt_path={checkpoint}", "--trainer.devices=1", *quiet)
    done = start_script(path, "test", *options, is_new=False)
    done.end(180)
    assert done.returncode == 0 and "test_acc" in done.text, done.text


def test_a_config_is_planned(gnnpipe: Commands) -> None:
    printed = gnnpipe.shows("plan", "--config=own_net.yaml", "--link_gbit=1")
    for text in ("398 nodes", "8 in 2", "of 1 Gbit/s", "one device, 1 chunk"):
        assert text in printed
    assert "[pipeline, 2 stages, 8 chunks]" in printed and "Fastest: " in printed
    printed = gnnpipe.shows("plan", "--config=own_net.yaml", "--num_devices=4", "--memory_gib=1e-6")
    for text in ("graph parallel, 4 shards, 1 chunk", "2 stages x 2 shards", "4 stages, 8 chunks"):
        assert text in printed
    assert "(too much)" in printed and "No layout fits" in printed
    assert not (gnnpipe.folder / "outputs").exists()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("fit", "'fit' is not a command of gnnpipe, which does not train. Write these"),
        ("predict", "run `python FILE predict --config run.yaml`"),
        ("check", "'check' was removed. Write print(GNNPipeStrategy().plan(module, loader))"),
        ("train", "'train' is not a command. Run `gnnpipe plan --help`."),
        ("", "usage: gnnpipe plan --config run.yaml"),
    ],
)
def test_other_commands_are_refused(gnnpipe: Commands, command: str, text: str) -> None:
    status, _, printed = gnnpipe(*filter(None, [command]))
    assert status == 2 and text in printed


def test_versions_and_options_are_shown_and_a_missing_package_named(gnnpipe: Commands) -> None:
    assert gnnpipe.shows("--version") == f"gnnpipe {lightning_gnnpipe.__version__}\n"
    assert "usage: gnnpipe plan" in gnnpipe.shows("--help")
    assert "--memory_gib" in gnnpipe.shows("plan", "--help")
    gnnpipe.monkeypatch.setattr(cli, "REQUIREMENT", "no-such-package-at-all")
    status, _, printed = gnnpipe("plan", "--config=own_net.yaml")
    assert status == 1 and "'no-such-package-at-all' to be installed" in printed
    assert 'pip install ".[cli]"' in printed


@pytest.mark.parametrize("arguments", ["--help", "--version", "fit", "plan --help"])
def test_what_needs_no_plan_is_answered_without_heavy_imports(arguments: str) -> None:
    code = "import atexit, sys, gnnpipe; atexit.register(lambda: print(*sys.modules)); "
    command = [sys.executable, "-c", f"{code}gnnpipe.main()", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, modules = done.stdout.splitlines()
    assert {"torch", "lightning", "lightning_gnnpipe"}.isdisjoint(modules.split()), modules


@pytest.mark.parametrize("config", ["cora.yaml", "digits.yaml", "own_net.yaml"])
def test_configs_are_read(gnnpipe: Commands, config: str) -> None:
    printed = gnnpipe.shows("plan", f"--config={config}", "--print_config=skip_unset")
    assert "GNNPipeStrategy" in printed


OWN = [GNNPipeStrategy, FullGraphDataModule, StalenessWarmup]


@pytest.mark.parametrize("kind", [*OWN, *(getattr(models, name) for name in models.__all__)])
def test_every_argument_is_typed_and_documented(kind: type[Any]) -> None:
    parameters = docstring_parser.parse(kind.__doc__ or "").params
    documented = {one.arg_name for one in parameters if one.description}
    for name, parameter in inspect.signature(kind).parameters.items():
        assert name in documented, f"{kind.__name__}: {name} is not documented"
        assert parameter.annotation is not parameter.empty, f"{kind.__name__}: {name} has no type"


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("option", "status", "text"),
    [
        ("--trainer.strategy=ddp", 1, "'trainer.strategy' to be GNNPipeStrategy"),
        ("--data=null", 1, "'data' to name a LightningDataModule"),
        ("--link_gbit=0", 1, "'link_gbit_per_s' to be positive"),
        ("--trainer.strategy.balance=[7]", 1, "'balance'"),
        ("--trainer.strategy.num_chunks=0", 1, "'num_chunks' to be between 1"),
        ("--model.net=own_net.Missing", 2, "own_net.Missing"),
        ("--config=nowhere.yaml", 2, "nowhere.yaml"),
        ("--trainer.strategy.partition=best", 2, "'metis', 'kaminpar'"),
        ("--trainer.strategy.history_dtype=int8", 2, "'bfloat16'"),
        ("--trainer.strategy.chunks=8", 2, "'chunks'"),
        ("--chunks=8", 2, "--chunks"),
    ],
)
def test_what_cannot_work_is_refused(
    gnnpipe: Commands, option: str, status: int, text: str
) -> None:
    found, _, printed = gnnpipe("plan", "--config=own_net.yaml", option)
    assert found == status and text in printed and "Traceback" not in printed


def test_errors_of_the_users_own_classes_are_shown(gnnpipe: Commands) -> None:
    lines = "from torch import nn", "class Net(nn.Module):", "  def __init__(self, width: int):"
    (gnnpipe.folder / "broken_net.py").write_text("\n".join([*lines, "    raise KeyError('mine')"]))
    broken = ("--model.net=broken_net.Net", "--model.net.width=4")
    status, _, printed = gnnpipe("plan", "--config=own_net.yaml", *broken)
    assert status == 1 and "'mine'" in printed


def test_a_function_is_taken_if_it_says_what_it_returns(gnnpipe: Commands) -> None:
    make = "from own_net import ResidualGAT\ndef make_net(){}:\n  return ResidualGAT(16, 8, 4)\n"
    for name, annotation in (("plain", ""), ("annotated", " -> ResidualGAT")):
        (gnnpipe.folder / f"{name}.py").write_text(make.format(annotation))
    options = "plan", "--config=own_net.yaml"
    status, _, printed = gnnpipe(*options, "--model.net=plain.make_net")
    assert status == 2 and "def make_net() -> torch.nn.Module:" in printed
    assert "one device, 1 chunk" in gnnpipe.shows(*options, "--model.net=annotated.make_net")
