"""The processes of a run: launching, ranks, collectives, failures.

Lightning's launchers start the ranks. A rank that fails says why, at once and by itself, since
Lightning, torch and torchrun kill all ranks soon after one has ended.

Decisions such as stopping or saving are taken by all ranks together.
"""

from __future__ import annotations

import atexit
import io
import itertools
import logging
import os
import random
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_gnnpipe._compat_torch import set_group_timeout
from lightning_gnnpipe.chunks import DIVIDED_CORES
from lightning_gnnpipe.comm import (
    GPU_BACKEND,
    Collectives,
    Meter,
    Transport,
    World,
    abandon_groups,
    cause_of,
    choose_wire,
    end_groups_at_exit,
    is_communication_error,
    restart_store,
    store_after_failure,
)
from lightning_gnnpipe.datamodule import FullGraphDataModule
from lightning_gnnpipe.errors import ConfigError, GNNPipeError, PeerError
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.stages import as_written, check_num_stages, find_pipelined, most_layers
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer.signals import StopSignals
from lightning_gnnpipe.user_code import is_users_file

T = TypeVar("T")

log = logging.getLogger(__name__)

_LEAST_START_TIMEOUT = timedelta(minutes=2)
_GRACE_S = 4.0


class Processes:
    """R replicas of S stages of G shards, one process each."""

    def __init__(
        self, strategy: _compat.LightningStrategy, options: StrategyOptions, backend: str | None
    ) -> None:
        self._strategy, self._options, self._backend = strategy, options, backend
        self._transport: Transport | None = None
        self._is_broken = False  # by an error, until the next run
        self.signals = StopSignals()

    @property
    def transport(self) -> Transport:
        """The messages between ranks, once the processes run."""
        assert self._transport is not None, "the processes have not been set up"
        return self._transport

    @property
    def are_set_up(self) -> bool:
        """Whether this process can send messages to other ranks, if there are any."""
        return self._transport is not None

    @property
    def everyone(self) -> Collectives:
        """Collective calls of all ranks."""
        return self.transport.everyone

    @property
    def has_peers(self) -> bool:
        """Whether this process is one of several ranks."""
        return self._transport is not None and self._transport.world.is_distributed

    @property
    def has_workers(self) -> bool:
        """Whether this process started the ranks and does not train itself."""
        return self._transport is None and isinstance(self._strategy.launcher, ForkLauncher)

    @property
    def is_interrupted(self) -> bool:
        """Whether other ranks may be gone: an error ended the run, not a signal that all obey."""
        trainer = self._strategy.trainer
        if trainer is None:
            return self.has_workers and sys.exc_info()[1] is not None
        is_stop = isinstance(sys.exc_info()[1], SIGTERMException)
        is_orderly = is_stop and self.signals.stops_together
        return bool(trainer.interrupted) and not is_orderly

    def make_launcher(self) -> Any:
        """Return the launcher of the processes; None if they run already."""
        strategy, method = self._strategy, self._options.start_method
        assert strategy.cluster_environment is not None
        num_processes, num_nodes = strategy.num_processes, strategy.num_nodes
        if num_processes * num_nodes == 1:
            return None
        is_external = strategy.cluster_environment.creates_processes_externally
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # as for Lightning
        if method == "fork" or (is_interactive and num_nodes == 1 and not is_external):
            if any(device.type == "cuda" for device in strategy.parallel_devices or ()):
                raise ConfigError(
                    expected="processes that can use a GPU",
                    found="forks of a process that has begun to use CUDA, as it has with the "
                    "import of torch_geometric",
                    remedy="Run a script, with start_method='popen', or train with devices=1.",
                )
            return ForkLauncher(strategy, start_method="fork")
        if is_external:
            return None
        return ScriptLauncher(strategy.cluster_environment, num_processes, num_nodes)

    def check_start(self, trainer: pl.Trainer, given: Sequence[object]) -> None:
        """Refuse numbers of devices and chunks that do not fit, as far as data and modules show."""
        strategy, options = self._strategy, self._options
        num_stages, _ = options.resolve_layout(strategy.num_nodes * strategy.num_processes)
        for data in given if trainer.state.fn == TrainerFn.FITTING else ():
            if isinstance(data, FullGraphDataModule):
                options.count_chunks(num_stages, int(data.data.num_nodes))
        module = strategy.user_module
        if any(is_overridden(hook, module) for hook in ("configure_model", "setup")):
            return  # which may make layers
        with as_written(module):
            num_layers = most_layers(find_pipelined(module, options.pipelined_module))
        if num_layers is not None:
            check_num_stages(num_layers, num_stages)

    def set_ranks(self) -> None:
        """Give the cluster environment the rank of this process and the number of ranks."""
        strategy = self._strategy
        if strategy.cluster_environment is not None:
            rank = strategy.node_rank * strategy.num_processes + strategy.local_rank
            strategy.cluster_environment.set_global_rank(rank)
            strategy.cluster_environment.set_world_size(strategy.num_nodes * strategy.num_processes)
        cast(Any, rank_zero_only).rank = strategy.global_rank

    def begin(self) -> None:
        """Refuse a process that was started by a Trainer with more devices."""
        strategy = self._strategy
        if isinstance(strategy.launcher, ForkLauncher):
            torch.set_num_threads(1)  # OpenMP would wait for threads that were not forked
        if strategy.local_rank >= strategy.num_processes:
            raise ConfigError(
                expected="the same number of devices as in the Trainer that started this process",
                found=f"devices={strategy.num_processes} in the process of local rank "
                f"{strategy.local_rank}",
                remedy="Each rank runs the script from the start. Use one Trainer, or the same "
                "number of devices in all Trainers.",
            )

    def connect(self) -> None:
        """Make the process groups, or use the groups of an earlier run of the same ranks."""
        self.set_ranks()
        strategy, options = self._strategy, self._options
        rank, size, device = strategy.global_rank, strategy.world_size, strategy.root_device
        layout, wire = options.resolve_layout(size), None
        if size > 1:
            backend = self._make_group()
            layout = options.resolve_layout(dist.get_world_size())
            wire = choose_wire(device, backend)
        world = World(rank, size, device, options.timeout, wire, options.data_parallel)
        if self._is_broken or self._transport is None or self._transport.world != world:
            self.end_run()
            self._transport, self._is_broken = Transport(world, layout, Meter()), False
        self._transport.begin_run()

    def end_run(self) -> None:
        """Stop watching the other ranks."""
        if self._transport is not None:
            self._transport.watch.stop()

    def _make_group(self) -> str:
        """Make the group of all processes and return its backend."""
        environment = self._strategy.cluster_environment
        assert environment is not None
        default = _compat.default_backend(self._strategy.root_device)
        backend = self._backend or (GPU_BACKEND if default == "nccl" else default)
        # Processes start at their own pace, so the first rendezvous may take longer than a message.
        timeout = max(self._options.timeout, _LEAST_START_TIMEOUT)
        store = store_after_failure()
        if store is None:
            store = restart_store(environment.main_address, environment.main_port, timeout)
        is_new = not dist.is_initialized()
        _compat.init_dist_connection(environment, backend, timeout=timeout, store=store)
        end_groups_at_exit(is_new=is_new)
        if is_new:
            self._transport = None  # its groups have ended
            # Once a process, since a new filter has Python show all warnings again.
            if self._options.data_parallel == 1:  # all ranks log the same values
                advice = r"It is recommended to use `self\.log\(.*sync_dist"
                warnings.filterwarnings("ignore", advice)
            if self._strategy.global_rank:  # the first rank shows them
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
        set_group_timeout(self._options.timeout)
        return backend

    def share_weights(self, module: nn.Module) -> None:
        """Copy rank 0's weights and buffers to all ranks; shapes and sparse ones must be equal."""
        if not self.has_peers:
            return
        named = [*module.named_parameters(), *module.named_buffers()]
        sparse = [one for _, one in named if one.layout is not torch.strided]
        shapes = [(name, tuple(one.shape), one.dtype) for name, one in named]
        own = [zlib.crc32(repr(shapes).encode()), _fingerprint(sparse)]
        if len(set(map(tuple, self.everyone.meet("compare weights", own)))) > 1:
            ranks = self.everyone.all_gather_objects(shapes)
            known = itertools.chain(*ranks)
            odd = [one[0] for one in known if not all(one in rank for rank in ranks)]
            raise ConfigError(
                expected="the same weights and buffers on all ranks",
                found=f"different shapes of '{odd[0]}'"
                if odd
                else "another order, or sparse buffers that differ",
                remedy="Call lightning.seed_everything(...) before the module is made.",
            )
        self.everyone.broadcast_all((one for _, one in named), 0)

    def share_start(self, module: nn.Module) -> int:
        """Copy rank 0's weights and random states to all ranks; return the seed of the run."""
        self.share_weights(module)
        device = self._strategy.root_device
        set_random_state(self.everyone.broadcast_object(random_state(device)), device)
        return self.everyone.broadcast_object(torch.initial_seed())

    def barrier(self, name: str | None) -> None:
        """Wait for all ranks, unless an error ended the run."""
        if self._meets_peers:
            self.everyone.meet(f"meet the other ranks ({name or 'barrier'})")

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src`; this rank's own if an error ended the run."""
        return self.everyone.broadcast_object(value, src) if self._meets_peers else value

    def vote(self, decision: bool, *, needs_all: bool) -> bool:
        """Return whether all ranks decided so, or with `needs_all=False` any of them."""
        if not self._meets_peers:
            return decision
        votes = [one[0] for one in self.everyone.meet("vote", [int(decision)])]
        return min(votes) == 1 if needs_all else max(votes) == 1

    @property
    def _meets_peers(self) -> bool:
        return self.has_peers and not self.is_interrupted

    def fail(self, exception: BaseException) -> None:
        """Say why this rank ends, tell the remaining ranks, and end the processes it started."""
        launcher: Any = self._strategy.launcher
        if self.has_workers:  # of which one has failed, or the user stops them
            launcher.kill(signal.SIGKILL)
        is_stop = isinstance(exception, SIGTERMException) and self.signals.stops_together
        if not self.has_peers or is_stop:
            return
        has_started = isinstance(launcher, _compat.SubprocessScriptLauncher) and launcher.procs
        # Lightning ends processes that it has started.
        abandon_groups(ends_ranks=bool(has_started) and isinstance(exception, KeyboardInterrupt))
        self._is_broken = True
        what = f"failed: {cause_of(exception)}"
        text = f"Rank {self._strategy.global_rank} {what}"
        if isinstance(exception, PeerError):
            text = str(exception)
        elif isinstance(exception, KeyboardInterrupt):  # Lightning has said so
            text = f"Rank {self._strategy.global_rank} was interrupted"
        is_ours = isinstance(exception, GNNPipeError | PeerError)
        is_mistake = not (is_ours or isinstance(exception, KeyboardInterrupt))
        first = self.transport.watch.fail(text)
        is_told = first is not None and first != text and first.endswith(what)
        is_told |= isinstance(exception, PeerError) and " failed: " in text
        if is_told and not isinstance(launcher, ForkLauncher):  # of forks torch shows one
            exception.__traceback__ = exception.__cause__ = None  # the first rank prints them
        elif is_mistake and not is_communication_error(exception):
            log.error("%s", text)
        _shorten(exception, keeps_rest=not is_ours)
        if has_started:
            atexit.register(_end, launcher)  # once this rank has printed its error


def _shorten(exception: BaseException, *, keeps_rest: bool) -> None:
    """Keep the user's own lines of the traceback; `keeps_rest`: and all that they have called.

    Each rank prints its traceback. The lines before the user's own lead through the Trainer.
    """
    error: BaseException | None = exception
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        line, lines, called = error.__traceback__, list[TracebackType](), list[TracebackType]()
        while line is not None:
            if is_users_file(line.tb_frame.f_code.co_filename):
                lines.append(line)
                called = []
            else:
                called.append(line)
            line = line.tb_next
        lines += called if keeps_rest else []
        for one, following in pairwise([*lines, None]):
            cast(Any, one).tb_next = following
        error.__traceback__ = lines[0] if lines else None
        error = error.__cause__ or error.__context__


def _end(launcher: Any) -> None:
    """Wait a few seconds for the started ranks to end with their own errors, then kill the rest."""
    deadline = time.monotonic() + _GRACE_S
    with suppress(KeyboardInterrupt):  # a second Ctrl+C ends the wait
        while time.monotonic() < deadline and any(one.poll() is None for one in launcher.procs):
            time.sleep(0.05)
    launcher.kill(signal.SIGKILL)


class ScriptLauncher(_compat.SubprocessScriptLauncher):
    """Lightning's launcher, which starts no process for what cannot run."""

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        trainer.strategy.check_start(trainer, args)
        is_set = "OMP_NUM_THREADS" in os.environ
        _compat.divide_threads(self.num_processes)  # before it starts processes, which inherit it
        if not is_set:
            os.environ[DIVIDED_CORES] = os.environ["OMP_NUM_THREADS"]
        return super().launch(function, *args, trainer=trainer, **kwargs)


class ForkLauncher(_compat.MultiProcessingLauncher):
    """Lightning's launcher, whose workers tell each other why they fail."""

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        trainer.strategy.check_start(trainer, args)
        state = random.getstate()

        def work(*args: Any, **kwargs: Any) -> Any:
            random.setstate(state)  # Python seeds it anew after a fork, differently on each rank
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                trainer.strategy.on_exception(error)
                if isinstance(error, SIGTERMException):  # with 0, Lightning would wait for a result
                    sys.exit(128 + signal.SIGTERM)
                raise

        found = super().launch(work, *args, trainer=trainer, **kwargs)
        if trainer.state.fn == TrainerFn.FITTING:
            renew_seed()
        return found


def _fingerprint(tensors: Sequence[Tensor]) -> int:
    with io.BytesIO() as file:
        torch.save([one.detach().cpu() for one in tensors], file)
        return zlib.crc32(file.getvalue())


def renew_seed() -> None:
    """Have torch draw other numbers, so that the next fit has masks of its own."""
    torch.manual_seed(random.Random(torch.initial_seed()).getrandbits(63))


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random streams, including a GPU `device`."""
    algorithm, keys, position, has_gauss, cached = cast(Any, np.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(algorithm), torch.from_numpy(keys.astype("int64")), position, has_gauss),
        "numpy_gauss": float(cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def random_number(device: torch.device) -> int:
    """Return a fingerprint of the states of all random streams."""
    _, keys, *place = cast(Any, np.random.get_state())
    found = zlib.crc32(keys.tobytes(), zlib.crc32(torch.get_rng_state().numpy().tobytes()))
    found = zlib.crc32(repr(place).encode(), found)
    if device.type == "cuda":
        found = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), found)
    return found ^ (hash(random.getstate()[1]) & 0xFFFFFFFF)


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    algorithm, keys, position, has_gauss = state["numpy"]
    keys = keys.numpy().astype("uint32")
    np.random.set_state((algorithm, keys, position, has_gauss, state["numpy_gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
