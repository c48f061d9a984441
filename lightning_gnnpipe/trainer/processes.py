"""The processes of a run: launching, ranks, collectives, failures.

Decisions such as stopping or saving are taken by all ranks together.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_gnnpipe._compat_torch import has_begun_cuda, set_group_timeout
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
    first_rank_tells,
    is_communication_error,
    restart_store,
)
from lightning_gnnpipe.errors import ConfigError, Fallbacks, PeerError
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer._compat_launcher import WorkerLauncher
from lightning_gnnpipe.trainer.random_state import random_state, set_random_state
from lightning_gnnpipe.trainer.signals import StopSignals
from lightning_gnnpipe.user_code import shorten, silence

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
        self._fallbacks = Fallbacks(log)
        self.signals = StopSignals()

    @property
    def transport(self) -> Transport:
        """The messages between ranks, once the processes run."""
        assert self._transport is not None, "the processes have not been set up"
        return self._transport

    @property
    def everyone(self) -> Collectives:
        """Collective calls of all ranks."""
        return self.transport.everyone

    @property
    def has_peers(self) -> bool:
        """Whether this process is one of several ranks."""
        return self._transport is not None and self._transport.world.is_distributed

    @property
    def has_stages(self) -> bool:
        """Whether ranks hold the weights of different stages."""
        return self.has_peers and self.transport.mesh.num_stages > 1

    @property
    def has_workers(self) -> bool:
        """Whether this process started the ranks and does not train itself."""
        return self._transport is None and isinstance(self._strategy.launcher, WorkerLauncher)

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
        if _compat.is_interactive() and num_nodes == 1 and not is_external:
            if method in ("spawn", "forkserver"):
                self._fallbacks.tell(
                    "In a notebook or an interactive shell processes can only be forked",
                    origin=f"start_method='{method}'",
                    to="start_method='fork'",
                )
            method = "fork"
        if method == "fork":
            self._refuse_cuda_in_forks()
        if method != "popen":
            launcher = WorkerLauncher(strategy, start_method=method)
            launcher.end_worker, launcher.is_fork = self._end_worker, method == "fork"
            return launcher
        if is_external:
            return None
        return _compat.SubprocessScriptLauncher(
            strategy.cluster_environment, num_processes, num_nodes
        )

    def _refuse_cuda_in_forks(self) -> None:
        """Refuse forks that need a GPU, of a process that has begun to use the driver."""
        devices = self._strategy.parallel_devices or ()
        if any(device.type == "cuda" for device in devices) and has_begun_cuda():
            raise ConfigError(
                expected="processes that can use a GPU",
                found="forks of a process that has begun to use CUDA, as it has with the import "
                "of torch_geometric",
                remedy="Run a script, with start_method='popen', or train with devices=1.",
            )

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
        if strategy.local_rank >= strategy.num_processes:
            raise ConfigError(
                expected="the same number of devices as in the Trainer that started this process",
                found=f"devices={strategy.num_processes} in the process of local rank "
                f"{strategy.local_rank}",
                remedy="Each rank runs the script from the start. Use one Trainer, the same "
                "number of devices in all Trainers, or "
                "GNNPipeStrategy(start_method='spawn').",
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
        if self._transport is None or self._transport.world != world:
            self.end_run()
            self._transport = Transport(world, layout, Meter())
        self._transport.begin_run(lambda: self.signals.received != 0)

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
        store = restart_store(environment.main_address, environment.main_port, timeout)
        is_new = not dist.is_initialized()
        _compat.init_dist_connection(environment, backend, timeout=timeout, store=store)
        end_groups_at_exit(is_new=is_new)
        if is_new:
            self._transport = None  # its groups have ended
        set_group_timeout(self._options.timeout)
        return backend

    def share_weights(self, module: nn.Module) -> None:
        """Copy rank 0's weights and buffers to all ranks."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                here = tensor.data.to(self._strategy.root_device)
                self.everyone.broadcast(here, 0, "control")
                tensor.data.copy_(here)

    def share_start(self, module: nn.Module) -> int:
        """Copy rank 0's weights and random states to all ranks; return the seed of the run."""
        self.share_weights(module)
        given = os.environ.get("PL_GLOBAL_SEED")
        device = self._strategy.root_device
        set_random_state(self.everyone.broadcast_object(random_state(device)), device)
        seed = int(given) if given is not None else torch.initial_seed()
        return self.everyone.broadcast_object(seed)

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

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; if one fails, all do."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as found:
            error = found
        if self.has_peers:
            texts = self.everyone.all_gather_objects(cause_of(error))
            failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
            if error is None and failed:
                raise PeerError(f"Rank {failed[0][0]} failed: {failed[0][1]}")
        if error is not None:
            raise error
        return result

    def fail(self, exception: BaseException) -> None:
        """Publish the error that ends this rank, log it once, and end the processes it started."""
        shorten(exception)
        if not self.has_peers:
            return
        if self.is_interrupted:
            abandon_groups()
        elif isinstance(exception, SIGTERMException):  # all ranks stop
            return
        started = self._take_started()
        try:
            self._report(exception)
        finally:  # also on Ctrl-C
            _end(started)

    def _report(self, exception: BaseException) -> None:
        """Publish and log `exception`; silence it if rank 0 prints it."""
        is_peers = isinstance(exception, PeerError)
        peer = self._publish(exception)
        rank = self._strategy.global_rank
        # Another launcher, such as torchrun, may end rank 0 before it has printed.
        by_lightning = isinstance(self._strategy.cluster_environment, LightningEnvironment)
        if by_lightning and first_rank_tells(repr(exception), rank, is_peers=is_peers):
            silence(exception)
        elif rank or peer:
            self._log_end(exception, peer)

    def _take_started(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that this rank started, and end Lightning's watch over them.

        Lightning kills this rank when one of them has failed, also if this rank has not printed
        the error that they share.
        """
        launcher = self._strategy.launcher
        if not isinstance(launcher, _compat.SubprocessScriptLauncher):
            return []
        started = list(launcher.procs)
        launcher.procs.clear()  # the watch reads this list, and ends when it is empty
        return started

    def _end_worker(self, exception: BaseException) -> None:
        """Publish and log the error that ends this worker, and do not wait for other ranks."""
        if self.has_peers:
            self._log_end(exception, self._publish(exception))
        abandon_groups()

    def _publish(self, exception: BaseException) -> str:
        """Publish why this rank ends; return the cause, if another rank published one before."""
        is_cause = not isinstance(exception, PeerError) and not is_communication_error(exception)
        own = cause_of(exception) or ""
        peer = self.transport.watch.fail(own, is_cause=is_cause)
        return "" if is_cause and peer.endswith(f"failed: {own}") else peer

    def _log_end(self, exception: BaseException, peer: str) -> None:
        rank = self._strategy.global_rank
        if peer and peer != str(exception):
            log.error("Rank %d ends: %s", rank, peer)
        elif not isinstance(
            exception, PeerError | KeyboardInterrupt
        ) and not is_communication_error(exception):
            log.error("Rank %d failed: %s", rank, cause_of(exception))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait a few seconds for `processes` to end with their own errors, then kill the rest."""
    deadline = time.monotonic() + _GRACE_S
    try:
        while time.monotonic() < deadline and any(one.poll() is None for one in processes):
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
