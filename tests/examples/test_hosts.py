"""The hosts of the benchmark `multi_host`: made, limited, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from tests.helpers.scripts import ROOT, fixture_of

PATH = ROOT / "examples" / "benchmarks" / "multi_host" / "hosts.py"
ANNOUNCE = "ip -o -4 addr show eth0; echo rank $RANK of $WORLD_SIZE, $MASTER_ADDR, links $LINKS"

hosts = fixture_of(PATH.parent, "hosts")


@pytest.fixture
def permitted(hosts: ModuleType) -> ModuleType:
    try:
        with hosts.Hosts(1):
            pass
    except hosts.HostsError as error:
        pytest.skip(str(error))
    return hosts


def namespaces() -> str:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return done.stdout


def test_what_is_missing_is_named(hosts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(hosts.HostsError, match="Expected to run as root"):
        hosts.Hosts(2).__enter__()
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else f"/{tool}")
    with pytest.raises(hosts.HostsError, match="command 'tc' \\(not found\\)"):
        hosts.check_permission()


def test_each_host_has_a_rank_and_a_link_of_its_own(permitted: ModuleType) -> None:
    with permitted.Hosts(3) as three:
        printed = three.run(["sh", "-c", ANNOUNCE], {}, timeout_s=20)
    for rank, text in enumerate(printed):
        assert f"198.18.0.{rank + 1}/24" in text
        assert f"rank {rank} of 3, 198.18.0.1, links eth0 " in text
        assert f"switch:port{rank}" in text
    assert three.names[0] not in namespaces()


def test_when_one_host_fails_all_end_and_are_removed(permitted: ModuleType) -> None:
    command = "if [ $RANK = 1 ]; then echo broken >&2; exit 3; fi; exec sleep 60"
    with (
        pytest.raises(RuntimeError, match="host 1: broken"),
        permitted.Hosts(2) as two,
    ):
        two.run(["sh", "-c", command], {}, timeout_s=50)
    assert two.names[0] not in namespaces()


LIMIT = """
import os, subprocess, sys
sys.path.append({folder!r})
from hosts import *
for rate in (100, None):
    for link in os.environ["LINKS"].split():
        limit_rate(link, rate)
        place, _, name = link.rpartition(":")
        tc = ["tc", *(["-n", place] if place else []), "qdisc", "show", "dev", name]
        print(subprocess.check_output(tc, text=True).strip())
"""


def test_a_link_lets_as_much_through_as_it_is_to(permitted: ModuleType) -> None:
    command = [sys.executable, "-c", LIMIT.format(folder=str(PATH.parent))]
    with permitted.Hosts(1) as one:
        *limited, free, free_too = one.run(command, {}, 20)[0].strip().split("\n")
    assert len(limited) == 2 and all("tbf" in one and "rate 100Mbit" in one for one in limited)
    assert "pfifo" in free and "pfifo" in free_too


def test_a_rank_that_ignores_sigterm_is_gone_with_its_host(permitted: ModuleType) -> None:
    stubborn = "trap '' TERM; sleep 71 & sleep 72"
    with pytest.raises(RuntimeError, match="failed"), permitted.Hosts(1) as one:
        one.run(["sh", "-c", stubborn], {}, timeout_s=1)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert not {"sleep 71", "sleep 72"} & set(running.stdout.splitlines())
