"""Every code block of the documentation and the README is run; see `small` for what is replaced.

Python blocks of a page are run in order, in one namespace; text blocks titled "prints" are what the
Python block before them prints. Commands are run, or are on a list of those that are not.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from gnnpipe import main
from tests.docs import small
from tests.docs.pages import PAGES, ROOT, Block, as_script, commands, read_blocks
from tests.helpers.cases import slow
from tests.helpers.scripts import start_script

SCRIPTS = ("docs/quickstart.md",)
"""Pages that are run as a user runs them: a file, which Lightning runs again for stage 1."""

LONG = ("docs/choosing.md", "docs/from-pyg.md")
LANGUAGES = {"python", "bash", "yaml", "text", ""}
NOT_RUN = (
    r"pip install ",
    r"(\.venv/bin/)?pip install -c constraints\.txt (torch==[\d.]+|-e \"\.\[\w+\]\")$",
    r"python3\.11 -m venv \.venv$",
    r"bash scripts/check\.sh$",
    r"export GLIBC_TUNABLES=",
    r"torchrun --standalone --nproc_per_node=2 --max-restarts=3 train\.py$",
    r"torchrun --nnodes=2 ",
    r"python main\.py (fit|validate|test|predict) --config run\.yaml",
    r"srun python train\.py$",
)
EXAMPLE = re.compile(r"(?:\.venv/bin/)?python (examples/\S+\.py)")


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if any(one.language == language for one in read_blocks(page))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, where everything is small and processes are forked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    small.install(monkeypatch, start_method="fork")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [slow(one) if one in LONG else one for one in pages_with("python") if one not in SCRIPTS],
)
def test_python_runs(page: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocks, names, printed = read_blocks(page), {"__name__": "__main__"}, ""
    for block in blocks:
        if block.language == "python":
            capfd.readouterr()
            code = compile(as_script([block], ""), PAGES[page], "exec")
            exec(code, names)
            printed = capfd.readouterr().out
        elif block.title == "prints":
            assert printed.strip() == block.text.strip(), f"{page}:{block.line}"


@pytest.mark.slow  # examples/test_runs.py does as much each time
@pytest.mark.parametrize("page", SCRIPTS)
@pytest.mark.parametrize("left_out", ["One device", "Two processes"])
def test_python_runs_as_a_script(
    page: str, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_line = "import pytest; from tests.docs import small; small.install(pytest.MonkeyPatch())"
    script = tmp_path / "train.py"
    blocks = [one for one in read_blocks(page) if one.title != left_out]
    script.write_text(as_script(blocks, first_line))
    monkeypatch.chdir(tmp_path)
    done = start_script(script, is_new=False)
    done.end(120)
    assert done.returncode == 0, f"{page} (lines are the page's)\n{done.text}"
    assert ("Starting with 2 processes" in done.text) == (left_out == "One device")


def save_configs(blocks: list[Block]) -> list[str]:
    """Write the configs of a page to the current folder; the first one is run.yaml."""
    texts = [block for block in blocks if block.language == "yaml"]
    names = [block.title or ("" if number else "run.yaml") for number, block in enumerate(texts)]
    for name, block in zip(names, texts, strict=True):
        assert name, f"line {block.line}: give the config a title"
        Path(name).write_text(block.text)
    return names


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gnnpipe", *arguments])
    try:
        return main()
    except SystemExit as done:  # --help, --print_config, or a wrong argument
        return int(done.code or 0)


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_configs_are_read(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, *others = save_configs(read_blocks(page))
    for names in ([first], *([first, other] for other in others)):
        files = [f"--config={name}" for name in names]
        assert run_command(monkeypatch, "plan", *files, "--print_config") == 0, capfd.readouterr()


@pytest.mark.parametrize(
    "page",
    # The commands of this one are those of test_cli.py, all of them.
    [slow(one) if one == "docs/command-line.md" else one for one in pages_with("bash")],
)
def test_commands_run(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small.install(monkeypatch, most_epochs=2)
    blocks = read_blocks(page)
    save_configs(blocks)
    for block in blocks:
        for command in commands(block) if block.language == "bash" else ():
            program, *arguments = shlex.split(command)
            if program == "gnnpipe":
                if "FILE" in arguments:  # stands for a checkpoint
                    arguments.append("--print_config")
                status = run_command(monkeypatch, *arguments)
                assert status == 0, f"{page}:{block.line} {command}\n{capfd.readouterr()}"
            elif example := EXAMPLE.match(command):
                assert (ROOT / example[1]).is_file(), f"{page}:{block.line} {command}"
            else:
                is_known = any(re.match(one, command) for one in NOT_RUN)
                assert is_known, f"{page}:{block.line}: run it, or say that it is not: {command}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_languages_that_are_run(page: str) -> None:
    assert {block.language for block in read_blocks(page)} <= LANGUAGES
