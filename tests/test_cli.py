"""The command line: one file for all commands, run as a user runs it."""

from __future__ import annotations

import csv
import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import torch

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup, models
from lightning_gnnpipe.cli import commands as cli
from tests.helpers.scripts import ROOT, Script, start_script

CONFIGS = ROOT / "examples" / "configs"
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class Commands:
    """Runs `gnnpipe` in a folder: in this process, or as a program of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))

    def __call__(self, *arguments: str) -> tuple[Any, str, str]:
        """Return the status, and what it has printed to both streams."""
        self.monkeypatch.setattr(sys, "argv", ["gnnpipe", *arguments])
        try:
            status: Any = cli.main()
        except SystemExit as done:
            status = done.code
        return (status, *self.capsys.readouterr())

    def shows(self, *arguments: str) -> str:
        """Return what a command prints that goes well."""
        status, printed, _ = self(*arguments)
        assert status == 0
        return printed

    def run(self, *arguments: str) -> Script:
        """As the installed script does: a file that Lightning runs again for the other ranks."""
        path = self.folder / "bin" / "gnnpipe"
        path.parent.mkdir(exist_ok=True)
        path.write_text("import sys\nfrom lightning_gnnpipe.cli import main\nsys.exit(main())\n")
        script = start_script(path, *arguments, is_new=False)
        script.end(180)
        return script


@pytest.fixture
def gnnpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Commands:
    """In a folder with the example configs, the user's own network beside them."""
    for path in CONFIGS.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return Commands(tmp_path, monkeypatch, capsys)


def test_one_file_serves_every_command(gnnpipe: Commands) -> None:
    """Trained by two processes, with a network of the user's; judged by one."""
    config = ("--config", "own_net.yaml")
    done = gnnpipe.run("fit", *config, "--trainer.max_epochs=4", *QUIET)
    assert done.returncode == 0, done.text
    assert "Starting with 2 processes" in done.text
    assert len(list(gnnpipe.folder.rglob("config.yaml"))) == 1
    [path] = gnnpipe.folder.rglob("metrics.csv")
    with path.open() as lines:
        losses = [float(row["val_loss"]) for row in csv.DictReader(lines) if row["val_loss"]]
    assert len(losses) == 4 and losses[-1] < losses[0]

    [checkpoint] = gnnpipe.folder.rglob("*.ckpt")
    later = (*config, "--trainer.devices=1", "--trainer.logger=false", *QUIET)
    later += (f"--ckpt_path={checkpoint}",)
    [loss] = re.findall(r"val_loss\D*([\d.]+)", gnnpipe.shows("validate", *later))
    assert float(loss) == pytest.approx(losses[-1], rel=1e-4)
    assert "test_acc" in gnnpipe.shows("test", *later)
    assert "predictions.pt" in gnnpipe.shows("predict", *later)
    [rows] = torch.load(gnnpipe.folder / "outputs" / "own_net" / "predictions.pt")
    assert rows.shape == (398, 4)
    printed = gnnpipe.shows("plan", *config)
    assert "8 layers in 2 stages" in printed and "[ms]" in printed and "[MiB]" in printed
    assert len(list(gnnpipe.folder.rglob("config.yaml"))) == 1


@pytest.mark.slow
def test_digits_are_trained_and_planned_from_one_file(gnnpipe: Commands) -> None:
    config, saved = ("--config", "digits.yaml"), gnnpipe.folder / "outputs/digits/config.yaml"
    printed = gnnpipe.shows("plan", *config, "--link_gbit=1")
    for text in ("16 layers in 2 stages", "1,797 nodes, 24,680 edges", "8 chunks", "of 1 Gbit/s"):
        assert text in printed
    # X both ways and the outputs; X_0 is computed again, and its weights' gradients are summed
    assert f"{2 * 1797 * 32 * 4 + 1797 * 10 * 4 + 2 * (64 * 32 + 32) * 4:,}" in printed
    assert not (gnnpipe.folder / "outputs").exists()
    printed = gnnpipe.shows("plan", *config, "--num_devices=4", "--memory_gib=0.000001")
    for text in ("1 x 4", "2 x 2", "4 x 1", "graph parallel", "best for 4 devices"):
        assert text in printed
    assert re.search(r"num_stages=\d, graph_parallel=\d", printed)
    assert "too much" in printed and "No layout fits" in printed

    fit = ("fit", *config, "--trainer.devices=1", "--trainer.max_epochs=1", *QUIET)
    gnnpipe.shows(*fit)
    first = saved.read_text()
    assert "num_chunks: 8" in first and "history_dtype: bfloat16" in first
    gnnpipe.shows(*fit, "--trainer.strategy.num_chunks=4")  # keeps what is there
    assert saved.read_text() == first


def test_a_missing_package_names_the_extra_and_check_needs_none(gnnpipe: Commands) -> None:
    """See reach/test_check.py for what `check` prints."""
    gnnpipe.monkeypatch.setattr(cli, "REQUIREMENTS", ("no-such-package-at-all",))
    status, _, printed = gnnpipe("fit", "--config=own_net.yaml")
    assert status == 1 and "'no-such-package-at-all' to be installed" in printed
    assert 'pip install "lightning-gnnpipe[cli]"' in printed
    (gnnpipe.folder / "train.py").write_text("import own_net\n")
    status, _, error = gnnpipe("check", "--num_devices=2", "train.py")
    assert status == 1 and "a script that calls Trainer.fit (got its end)" in error
    assert "--num_devices" in gnnpipe.shows("check", "--help")


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--model=NodeClassifier"], ["class_path: lightning_gnnpipe.GNNPipeStrategy"]),
        (
            ["--config=cora.yaml"],
            ["datasets.Planetoid", "transforms.NormalizeFeatures", "StalenessMonitor"],
        ),
        (
            ["--model=NodeClassifier", "--trainer.strategy.halo_codec=[int1,bf16]"],
            [r"halo_codec:\s+- int1\s+- bf16\s"],
        ),
    ],
    ids=["defaults", "data set of PyG", "pair of codecs"],
)
def test_what_a_config_may_say(gnnpipe: Commands, options: list[str], texts: list[str]) -> None:
    printed = gnnpipe.shows("fit", *options, "--print_config=skip_unset")
    for text in texts:
        assert re.search(text, printed)


def test_help_shows_every_option_of_the_strategy(gnnpipe: Commands) -> None:
    printed = gnnpipe.shows("fit", "--trainer.strategy.help=GNNPipeStrategy")
    printed = " ".join(printed.split()).split("Help for")[1]
    for name in inspect.signature(GNNPipeStrategy).parameters:
        option = rf"--trainer\.strategy\.{name} \S+ (?:--\S+ \S+ )?"
        entry = re.search(rf"{option}((?:(?! --).)*?) ?\(type: .*?, default: ", printed)
        assert entry is not None and len(entry[1]) > 10, f"no help for {name}"
    assert "Union[dtype, Literal['bfloat16', " in printed


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
    ("arguments", "text"),
    [
        (["plan", "--trainer.strategy=ddp"], "'trainer.strategy' to be GNNPipeStrategy"),
        (["plan", "--data=null"], "'data' to name a LightningDataModule"),
        (["plan", "--link_gbit=0"], "'link_gbit_per_s' to be positive"),
        (["fit", "--trainer.strategy.num_chunks=0"], "'num_chunks' to be between 1"),
        (["fit", "--data.split=3"], "'split' to be between 0 and 0"),
        (["fit", "--trainer.devices=0"], "Trainer"),
    ],
)
def test_what_cannot_work_is_refused(gnnpipe: Commands, arguments: list[str], text: str) -> None:
    command, *options = arguments
    status, _, printed = gnnpipe(command, "--config=own_net.yaml", *options)
    assert status == 1 and text in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--config=nowhere.yaml"], "nowhere.yaml"),
        (["--config=own_net.yaml", "--model.net=own_net.Missing"], "own_net.Missing"),
        (["--config=own_net.yaml", "--trainer.strategy.partition=best"], "'metis', 'random'"),
        (["--config=own_net.yaml", "--trainer.strategy.history_dtype=int8"], "'bfloat16'"),
        (["--config=own_net.yaml", "--trainer.strategy.chunks=8"], "chunks"),
    ],
)
def test_what_cannot_be_read_is_refused(gnnpipe: Commands, options: list[str], text: str) -> None:
    status, _, printed = gnnpipe("fit", *options)
    assert status == 2 and text in printed and re.search("gnnpipe (fit|COMMAND) --help", printed)
    assert printed.count("\n") < 20 and "usage" not in printed


def test_errors_of_the_users_own_classes_are_not_hidden(gnnpipe: Commands) -> None:
    (gnnpipe.folder / "broken_net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self, width: int) -> None:\n        raise KeyError('not there')\n"
    )
    net = ("--model.net=broken_net.Net", "--model.net.width=4")
    with pytest.raises(KeyError, match="not there"):
        gnnpipe("plan", "--config=own_net.yaml", *net)


@pytest.mark.slow
def test_a_failing_fit_of_two_processes_ends_with_its_error(gnnpipe: Commands) -> None:
    done = gnnpipe.run(
        "fit", "--config=own_net.yaml", "--trainer.strategy.balance=[7]", "--trainer.logger=false"
    )
    assert done.returncode == 1
    assert done.text.count("gnnpipe: Expected") == 1 and "Traceback" not in done.text
