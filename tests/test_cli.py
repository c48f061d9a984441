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
from lightning_gnnpipe.options import StrategyOptions
from tests.helpers.scripts import Script, start_script

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CONFIGS = EXAMPLES / "configs"
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class Commands:
    """Runs `gnnpipe` in a folder: in this process, or as a program of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))

    def __call__(self, *arguments: str) -> int:
        self.monkeypatch.setattr(sys, "argv", ["gnnpipe", *arguments])
        return cli.main()

    def run(self, *arguments: str) -> Script:
        """As the installed script does: a file that Lightning runs again for the other ranks."""
        path = self.folder / "bin" / "gnnpipe"
        path.parent.mkdir(exist_ok=True)
        path.write_text("import sys\nfrom lightning_gnnpipe.cli import main\nsys.exit(main())\n")
        script = start_script(path, *arguments, is_new=False)
        script.end(180)
        return script


@pytest.fixture
def gnnpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """In a folder with the example configs, the user's own network beside them."""
    for path in CONFIGS.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return Commands(tmp_path, monkeypatch)


def logged(folder: Path, name: str) -> list[float]:
    [path] = folder.rglob("metrics.csv")
    with path.open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row[name]]


def test_one_file_serves_every_command(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained by two processes, with a network of the user's; judged by one."""
    config = ("--config", "own_net.yaml")
    done = gnnpipe.run("fit", *config, "--trainer.max_epochs=4", *QUIET)
    assert done.returncode == 0, done.text
    assert "Starting with 2 processes" in done.text
    assert len(list(gnnpipe.folder.rglob("config.yaml"))) == 1
    losses = logged(gnnpipe.folder, "val_loss")
    assert len(losses) == 4 and losses[-1] < losses[0]

    [checkpoint] = gnnpipe.folder.rglob("*.ckpt")
    later = (*config, "--trainer.devices=1", "--trainer.logger=false", *QUIET)
    for command, metric in (("validate", "val_loss"), ("test", "test_acc"), ("predict", "")):
        assert gnnpipe(command, *later, f"--ckpt_path={checkpoint}") == 0
        printed = capsys.readouterr().out
        assert metric in printed
        if command == "predict":
            [rows] = torch.load(gnnpipe.folder / "outputs" / "own_net" / "predictions.pt")
            assert rows.shape == (398, 4) and "predictions.pt" in printed
        if command == "validate":
            [loss] = re.findall(r"val_loss\D*([\d.]+)", printed)
            assert float(loss) == pytest.approx(losses[-1], rel=1e-4)
    assert gnnpipe("plan", *config) == 0
    printed = capsys.readouterr().out
    assert "8 layers in 2 stages" in printed and "[ms]" in printed and "[MiB]" in printed
    assert len(list(gnnpipe.folder.rglob("config.yaml"))) == 1


def test_digits_are_trained_and_planned_from_one_file(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", "digits.yaml")
    assert gnnpipe("plan", *config, "--link_gbit=1") == 0
    printed = capsys.readouterr().out
    for text in ("16 layers in 2 stages", "1,797 nodes, 24,680 edges", "8 chunks", "of 1 Gbit/s"):
        assert text in printed
    # X both ways and the outputs; X_0 is computed again, and its weights' gradients are summed
    assert f"{2 * 1797 * 32 * 4 + 1797 * 10 * 4 + 2 * (64 * 32 + 32) * 4:,}" in printed
    assert not (gnnpipe.folder / "outputs").exists()
    assert gnnpipe("plan", *config, "--num_devices=4", "--memory_gib=0.000001") == 0
    printed = capsys.readouterr().out
    for text in ("1 x 4", "2 x 2", "4 x 1", "graph parallel", "best for 4 devices"):
        assert text in printed
    assert re.search(r"num_stages=\d, graph_parallel=\d", printed)
    assert "too much" in printed and "No layout fits" in printed

    fit = ("fit", *config, "--trainer.devices=1", "--trainer.max_epochs=1", *QUIET)
    assert gnnpipe(*fit) == 0
    saved = (gnnpipe.folder / "outputs" / "digits" / "config.yaml").read_text()
    assert "num_chunks: 8" in saved and "history_dtype: bfloat16" in saved
    assert gnnpipe(*fit, "--trainer.strategy.num_chunks=4") == 0  # keeps what is there
    assert (gnnpipe.folder / "outputs" / "digits" / "config.yaml").read_text() == saved


def test_a_script_is_checked_before_all_else(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no extra; see reach/test_check.py for what is printed."""
    gnnpipe.monkeypatch.setattr(cli, "REQUIREMENTS", ("no-such-package-at-all",))
    (gnnpipe.folder / "train.py").write_text("import own_net\n")
    assert gnnpipe("check", "--num_devices=2", "train.py") == 1
    assert "a script that calls Trainer.fit (got its end)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        gnnpipe("check", "--help")
    assert done.value.code == 0 and "--num_devices" in capsys.readouterr().out


def test_defaults_are_the_strategy_and_its_defaults(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        gnnpipe("fit", "--model=NodeClassifier", "--print_config=skip_unset")
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert "class_path: lightning_gnnpipe.GNNPipeStrategy" in printed


def test_a_data_set_of_pyg_is_named_by_its_class(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        gnnpipe("fit", "--config=cora.yaml", "--print_config")
    assert done.value.code == 0
    printed = capsys.readouterr().out
    for name in ("datasets.Planetoid", "transforms.NormalizeFeatures", "StalenessMonitor"):
        assert name in printed


def test_the_config_of_the_page_is_read(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    config = re.findall(r"```yaml.*?\n(.*?)```", page, re.DOTALL)[0]
    (gnnpipe.folder / "run.yaml").write_text(config)
    with pytest.raises(SystemExit) as done:
        gnnpipe("fit", "--config=run.yaml", "--print_config")
    assert done.value.code == 0
    assert "num_chunks: 16" in capsys.readouterr().out


def test_a_codec_of_gradients_is_named_beside_that_of_rows(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    codecs = "--trainer.strategy.halo_codec=[int1,bf16]"
    with pytest.raises(SystemExit) as done:
        gnnpipe("fit", "--model=NodeClassifier", codecs, "--print_config")
    assert done.value.code == 0
    assert re.search(r"halo_codec:\s+- int1\s+- bf16\s", capsys.readouterr().out)


def test_help_shows_every_option_of_the_strategy(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        gnnpipe("fit", "--trainer.strategy.help=GNNPipeStrategy")
    assert done.value.code == 0
    printed = " ".join(capsys.readouterr().out.split()).split("Help for")[1]
    for name in inspect.signature(GNNPipeStrategy).parameters:
        option = rf"--trainer\.strategy\.{name} \S+ (?:--\S+ \S+ )?"
        entry = re.search(rf"{option}((?:(?! --).)*?) ?\(type: .*?, default: ", printed)
        assert entry is not None and len(entry[1]) > 10, f"no help for {name}"
    assert "Union[dtype, Literal['bfloat16', " in printed


@pytest.mark.parametrize(
    "kind",
    [
        GNNPipeStrategy,
        FullGraphDataModule,
        StalenessWarmup,
        *(getattr(models, name) for name in models.__all__),
    ],
)
def test_every_argument_is_typed_and_documented(kind: type[Any]) -> None:
    documented = {
        one.arg_name for one in docstring_parser.parse(kind.__doc__ or "").params if one.description
    }
    for name, parameter in inspect.signature(kind).parameters.items():
        assert name in documented, f"{kind.__name__}: {name} is not documented"
        assert parameter.annotation is not parameter.empty, f"{kind.__name__}: {name} has no type"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "--trainer.devices=9"], "9 stages and 8 layers"),
        (["plan", "--trainer.strategy=ddp"], "'trainer.strategy' to be GNNPipeStrategy"),
        (["plan", "--data=null"], "'data' to name a LightningDataModule"),
        (["plan", "--link_gbit=0"], "'link_gbit_per_s' to be positive"),
        (["plan", "--num_devices=0"], "'num_devices' to be at least 1"),
        (["plan", "--trainer.strategy.num_stages=3"], "'num_stages' to be 2 for 2 processes"),
        (["fit", "--trainer.strategy.num_chunks=0"], "'num_chunks' to be between 1"),
        (["fit", "--data.split=3"], "'split' to be between 0 and 0"),
        (["fit", "--trainer.devices=0"], "Trainer"),
    ],
)
def test_what_cannot_work_is_refused_without_a_traceback(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    command, *options = arguments
    assert gnnpipe(command, "--config=own_net.yaml", *options) == 1
    printed = capsys.readouterr().err
    assert text in printed and "Traceback" not in printed


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
def test_what_cannot_be_read_is_refused_by_the_parser(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as done:
        gnnpipe("fit", *options)
    assert done.value.code == 2
    printed = capsys.readouterr().err
    assert text in printed and re.search("gnnpipe (fit|COMMAND) --help", printed)
    assert printed.count("\n") < 20 and "usage" not in printed


def test_errors_of_the_users_own_classes_are_not_hidden(gnnpipe: Commands) -> None:
    (gnnpipe.folder / "broken_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width: int) -> None:\n"
        "        raise KeyError('not there')\n"
    )
    net = ("--model.net=broken_net.Net", "--model.net.width=4")
    with pytest.raises(KeyError, match="not there"):
        gnnpipe("plan", "--config=own_net.yaml", *net)


def test_a_failing_fit_of_two_processes_ends_with_its_error(gnnpipe: Commands) -> None:
    done = gnnpipe.run(
        "fit", "--config=own_net.yaml", "--trainer.strategy.balance=[7]", "--trainer.logger=false"
    )
    assert done.returncode == 1
    assert done.text.count("gnnpipe: Expected") == 1 and "Traceback" not in done.text


def test_a_missing_package_names_the_extra(
    gnnpipe: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    gnnpipe.monkeypatch.setattr(cli, "REQUIREMENTS", ("no-such-package-at-all",))
    assert gnnpipe("fit", "--config=own_net.yaml") == 1
    printed = capsys.readouterr().err
    assert "'no-such-package-at-all' to be installed" in printed
    assert 'pip install "lightning-gnnpipe[cli]"' in printed


def test_a_dtype_can_be_named() -> None:
    def options(dtype: Any) -> StrategyOptions:
        return GNNPipeStrategy(history_dtype=dtype).options

    assert options("bfloat16").histories == options(torch.bfloat16).histories
    assert options("float16").histories.dtype is torch.float16
    with pytest.raises(ValueError, match=r"'history_dtype' to be one of bfloat16, .*got 'int8'"):
        options("int8")
