"""Private names of Lightning, torch and PyG: which they are; `_compat*` alone uses them.

A test that fails here is named after the name that disappeared. Mend `_compat*`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from packaging.requirements import Requirement
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, MessagePassing

from lightning_gnnpipe import _compat_torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_gnnpipe"
COMPAT = sorted(PACKAGE.rglob("_compat*.py"))

PYG = "torch_geometric.nn"
FABRIC = "lightning.fabric.utilities"
LIGHTNING = "lightning.pytorch"

# Where each is defined: a module, a class in it, and what belongs to that class or its instances.
OWNERS = {
    f"{FABRIC}.cloud_io:": "_load",
    f"{FABRIC}.distributed:": "_get_default_process_group_backend_for_device "
    "_init_dist_connection _sync_ddp_if_available _set_num_threads_if_needed",
    f"{FABRIC}.types:": "_PATH",
    f"{LIGHTNING}.strategies.launchers:": "_MultiProcessingLauncher _SubprocessScriptLauncher",
    f"{LIGHTNING}.loops.fetchers:": "_DataLoaderIterDataFetcher",
    f"{LIGHTNING}:LightningModule.": "_current_fx_name _trainer",
    f"{LIGHTNING}:Trainer.": "_accelerator_connector _active_loop fit_loop._skip_backward "
    "fit_loop._can_stop_early fit_loop.epoch_loop._should_check_val_fx predict_loop._data_fetcher",
    f"{LIGHTNING}.callbacks:": "ModelCheckpoint._last_global_step_saved "
    "StochasticWeightAveraging._average_model",
    f"{LIGHTNING}.strategies:ParallelStrategy.": "_checkpoint_io _configure_launcher _launcher "
    "_layer_sync",
    "torch:Tensor.": "_backward_hooks _post_accumulate_grad_hooks _version",
    "torch.utils:": "_python_dispatch _pytree",
    "torch:_C.": "_will_engine_execute_node DisableTorchFunctionSubclass",
    "torch._dynamo:config.": "error_on_nested_fx_trace",
    "torch.amp:GradScaler.": "_unscale_grads_",
    "torch.fx:Tracer.": "_autowrap_search",
    "torch.distributed.checkpoint.filesystem:": "_StorageInfo",
    "torch.distributed.checkpoint.metadata:": "_MEM_FORMAT_ENCODING",
    "torch.distributed.distributed_c10d:": "_get_default_store _set_pg_timeout",
    "torch.distributed:ProcessGroup.": "_get_backend",
    "torch.nn.modules.batchnorm:": "_BatchNorm",
    "torch.nn.modules.instancenorm:": "_InstanceNorm",
    "torch.nn:Module.": "_backward_hooks _backward_pre_hooks "
    "_compiled_call_impl _forward_hooks _forward_pre_hooks",
    "torch.nn.utils.parametrizations:": "_SpectralNorm",
    "torch.nn.utils.spectral_norm:": "SpectralNorm",
    "torch.serialization:": "_get_layout",
    "torch_geometric.data:Batch.": "_inc_dict _slice_dict",
    f"{PYG}:": "APPNP._cached_adj_t APPNP._cached_edge_index SGConv._cached_x SSGConv._cached_h",
    f"{PYG}:MessagePassing.": "_aggregate_forward_hooks _decomposed_layers _edge_user_args "
    "_message_forward_hooks _propagate_forward_hooks _user_args inspector.get_param_names "
    "special_args",
}
NAMES = [owner + name for owner, names in OWNERS.items() for name in names.split()]
# Attributes that only instances have, and how to make one.
INSTANCES: dict[str, tuple[Any, ...]] = {
    "APPNP": (1, 0.1),
    "SGConv": (2, 2),
    "SSGConv": (2, 2, 0.1),
    "StochasticWeightAveraging": (0.1,),
}
# Not attributes of anything before they are set: torch.compile's, and prefixes of names.
UNLISTED = {
    *("_orig_mod", "_propagate_", "_message_", "_aggregate_", "_edge_update_"),
    *("_propagate", "_global_", "_torchdynamo_orig_callable"),
    "_optimizer_step_post_hooks",  # of instances alone
    "_broadcast_sigterm_tensor",  # nothing before Lightning 2.6
    "_val_check_time_interval",  # likewise
}
# Parts of keys and of the user's names, and the mark of a namedtuple, which Python documents.
HARMLESS = {
    *("_batch", "_ptr", "_edge_index", "_mask", "_acc", "_loss", "_metric"),
    *("_i", "_j", "_fields", "_shard_"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_where_it_was(name: str) -> None:
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(owner, part) and inspect.isclass(owner):
            owner = instance_of(owner)
        assert hasattr(owner, part), f"{name}: {part} disappeared"
        owner = getattr(owner, part)


def instance_of(kind: type) -> Any:
    if kind.__name__ == "ParallelStrategy":
        return DDPStrategy()
    if kind is MessagePassing:  # of its own class PyG would change `propagate`, for all layers
        return GCNConv(1, 1)
    if kind.__name__ == "Batch":
        return kind.from_data_list([Data(x=torch.zeros(1, 1))])
    if kind.__name__ == "Trainer":
        return kind(logger=False, enable_checkpointing=False, accelerator="cpu")
    return kind(*INSTANCES.get(kind.__name__, ()))


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the private names of others that a file uses, and the lines.

    A name that the file itself defines is its own; names of `self` are looked at separately.
    """
    tree, own = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and is_stored and is_of_self(node):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and is_stored:
            own.add(node.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_of_self(node):
            if node.attr not in own or is_of_super(node):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("__"):
            parts = (node.module or "").split(".")
            ours = parts[0] == PACKAGE.name
            for one in (*(alias.name for alias in node.names), *(() if ours else parts)):
                if is_private(one) and not (ours and one.startswith("_compat")):
                    yield node.lineno, one
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-zA-Z]\w*", str(node.value)):
            yield node.lineno, str(node.value)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_of_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"


@pytest.mark.parametrize(
    "path",
    [one for one in sorted(PACKAGE.rglob("*.py")) if one not in COMPAT],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_private_names_of_others_are_used_in_compat_alone(path: Path) -> None:
    found = [(line, name) for line, name in private_names(path) if name not in HARMLESS]
    assert not found, f"{path.name}: put {found} behind _compat"


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: path.name)
def test_private_names_that_compat_uses_are_listed(path: Path) -> None:
    listed = {part for name in NAMES for part in re.split("[:.]", name)}
    used = {name for _, name in private_names(path)} - UNLISTED
    assert used <= listed, f"list {used - listed} in NAMES"


def test_timeouts_of_groups_are_set_by_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The private one prints a deprecation there."""
    given: list[Any] = []
    monkeypatch.setattr(dist, "set_timeout", lambda *args: given.append(args), raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", None)
    group: Any = object()
    _compat_torch.set_group_timeout(timedelta(seconds=3), group)
    assert given == [(timedelta(seconds=3), group)]


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_compromised_releases_are_not_installed(name: str) -> None:
    """GHSA-w37p-236h-pfx3."""
    tomllib, bad = pytest.importorskip("tomllib"), {"2.6.2", "2.6.3"}  # from Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    required = [Requirement(one) for one in (*project["dependencies"], *extras)]
    assert any(one.name == "lightning" for one in required)
    assert not any(bad & set(one.specifier.filter(bad)) for one in required if one.name == name)
    for file in ("constraints.txt", "constraints-oldest.txt"):
        assert not {f"{name}=={one}" for one in bad} & set((ROOT / file).read_text().split())
