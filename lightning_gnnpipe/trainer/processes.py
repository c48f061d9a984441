"""Processes and collectives as Lightning sees them: launching, ranks, barriers, reductions.

Decisions (stop now? save now?) are taken by all ranks together. What is done over replicas of the
data is in `replicas`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_gnnpipe._compat_torch import set_group_timeout
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
    is_lost,
    restart_store,
)
from lightning_gnnpipe.errors import ConfigError, PeerError, explain
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer.launcher import WorkerLauncher, random_state, set_random_state
from lightning_gnnpipe.user_code import shorten, silence

T = TypeVar("T")

log = logging.getLogger(__name__)

_LEAST_START_TIMEOUT = timedelta(minutes=2)
_GRACE_S = 4.0


class PipeProcesses(_compat.LightningStrategy):
    """The processes: R replicas of S stages of G shards.

    Args:
        options: Of the strategy.
        process_group_backend: Of torch.distributed; None for the device's own.
        plugins: Passed on to `ParallelStrategy`.
    """

    def __init__(
        self, options: StrategyOptions, process_group_backend: str | None, **plugins: Any
    ) -> None:
        super().__init__(**plugins)
        self.options = options
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._transport: Transport | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should treat loaders and logging as distributed."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _pipe(self) -> Transport:
        assert self._transport is not None, "the processes have not been set up"
        return self._transport

    @property
    def _everyone(self) -> Collectives:
        """What all ranks do together."""
        return self._pipe.everyone

    @property
    def _has_peers(self) -> bool:
        """Whether there are other ranks, and this process is one of them."""
        return self._transport is not None and self._transport.world.is_distributed

    @property
    def _has_stages(self) -> bool:
        """Whether ranks hold the weights of different stages."""
        return self._has_peers and self._pipe.mesh.num_stages > 1

    @property
    def _is_interrupted(self) -> bool:
        """Whether other ranks may be gone, so that none may wait for them."""
        return False

    @property
    def _is_stopping(self) -> bool:
        """Whether this process has been told to stop."""
        return False

    @property
    def _meets_peers(self) -> bool:
        return self._has_peers and not self._is_interrupted

    @property
    def _has_workers(self) -> bool:
        """Whether this process has started those that train, and does not train itself."""
        return self._transport is None and isinstance(self.launcher, WorkerLauncher)

    def make_launcher(self) -> Any:
        assert self.cluster_environment is not None
        if self.num_processes * self.num_nodes == 1:
            return None
        if self.options.start_method != "popen":
            return WorkerLauncher(self, start_method=self.options.start_method)
        if self.cluster_environment.creates_processes_externally:
            return None
        return _compat.SubprocessScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def set_world_ranks(self) -> None:
        """Tell the environment this process's place among all."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        cast(Any, rank_zero_only).rank = self.global_rank

    def setup_environment(self) -> None:
        if self.local_rank >= self.num_processes:
            raise ConfigError(
                explain(
                    expected="as many devices as the Trainer that has started this process has",
                    found=f"devices={self.num_processes} in the process of local rank "
                    f"{self.local_rank}",
                    remedy="Each rank runs the script from its beginning. Use one Trainer a "
                    "script, the same number of devices in all of them, or "
                    "GNNPipeStrategy(start_method='spawn').",
                )
            )
        if isinstance(self.launcher, WorkerLauncher) and self.launcher.random_state is not None:
            set_random_state(self.launcher.random_state, torch.device("cpu"))
            self.launcher.random_state = None
        super().setup_environment()
        self.set_world_ranks()
        layout, wire = self.options.resolve_layout(self.world_size), None
        if self.world_size > 1:
            backend = self._connect()
            layout = self.options.resolve_layout(dist.get_world_size())
            wire = choose_wire(self.root_device, backend)
        world = World(
            self.global_rank,
            self.world_size,
            self.root_device,
            self.options.timeout,
            wire,
            self.options.data_parallel,
        )
        if self._transport is None or self._transport.world != world:
            if self._transport is not None:
                self._transport.end_run()
            self._transport = Transport(world, layout, Meter())
        self._transport.begin_run(lambda: self._is_stopping)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self._transport is not None:
                self._transport.end_run()

    def _connect(self) -> str:
        """Make the group of all processes; return its backend."""
        environment = self.cluster_environment
        assert environment is not None
        backend = self._process_group_backend or _default_backend(self.root_device)
        # Processes start at their own pace: the first meeting may take longer than a message.
        timeout = max(self.options.timeout, _LEAST_START_TIMEOUT)
        store = restart_store(environment.main_address, environment.main_port, timeout)
        is_new = not dist.is_initialized()
        _compat.init_dist_connection(environment, backend, timeout=timeout, store=store)
        end_groups_at_exit(is_new=is_new)
        if is_new:
            self._transport = None  # its groups have ended
        set_group_timeout(self.options.timeout)
        return backend

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _share_weights(self, module: nn.Module) -> None:
        """Give all ranks rank 0's weights."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                here = tensor.data.to(self.root_device)
                self._everyone.broadcast(here, 0, "control")
                tensor.data.copy_(here)

    def _share_start(self, module: nn.Module) -> int:
        """Give all ranks rank 0's weights and random numbers; return the seed of the run."""
        self._share_weights(module)
        given = os.environ.get("PL_GLOBAL_SEED")
        state = self._everyone.broadcast_object(random_state(self.root_device))
        set_random_state(state, self.root_device)
        seed = int(given) if given is not None else torch.initial_seed()
        return self._everyone.broadcast_object(seed)

    def barrier(self, name: str | None = None) -> None:
        if self._meets_peers:
            self._everyone.meet(f"meet the other ranks ({name or 'barrier'})")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._everyone.broadcast_object(obj, src) if self._meets_peers else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all, or any, ranks decided so."""
        if not self._meets_peers:
            return decision
        votes = [one[0] for one in self._everyone.meet("vote", [int(decision)])]
        return min(votes) == 1 if all else max(votes) == 1

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; if one fails, all do."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as found:
            error = found
        if self._has_peers:
            texts = self._everyone.all_gather_objects(cause_of(error))
            failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
            if error is None and failed:
                raise PeerError(f"Rank {failed[0][0]} failed: {failed[0][1]}")
        if error is not None:
            raise error
        return result

    def on_exception(self, exception: BaseException) -> None:
        """Say who failed, and leave no process behind that waits, or sleeps, for ever."""
        super().on_exception(exception)
        shorten(exception)
        if not self._has_peers:
            return
        if self._is_interrupted:
            self.abandon()
        if isinstance(exception, SIGTERMException) and not self._is_interrupted:  # all ranks stop
            return
        is_peers = isinstance(exception, PeerError)
        peer = self._publish(exception)
        if first_rank_tells(repr(exception), self.global_rank, is_peers=is_peers):
            silence(exception)
        elif self.global_rank or peer:
            self._log_end(exception, peer)
        if isinstance(self.launcher, _compat.SubprocessScriptLauncher):
            _end(self.launcher.procs)

    def end_with(self, exception: BaseException) -> None:
        """Let all ranks know with what error this one ends."""
        if self._has_peers:
            self._log_end(exception, self._publish(exception))

    def _publish(self, exception: BaseException) -> str:
        """Let all ranks know why this one ends; return why it does, if that is another's fault."""
        is_cause = not isinstance(exception, PeerError) and not is_lost(exception)
        return self._pipe.watch.fail(cause_of(exception) or "", is_cause=is_cause)

    def _log_end(self, exception: BaseException, peer: str) -> None:
        if peer and peer != str(exception):
            log.error("Rank %d ends: %s", self.global_rank, peer)
        elif not isinstance(exception, PeerError | KeyboardInterrupt) and not is_lost(exception):
            log.error("Rank %d failed: %s", self.global_rank, cause_of(exception))

    def abandon(self) -> None:
        """Do not wait for other ranks when this process ends."""
        abandon_groups()


def _default_backend(device: torch.device) -> str:
    backend = _compat.default_backend(device)
    return GPU_BACKEND if backend == "nccl" else backend


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give `processes` a moment to end by themselves, with their own errors, then kill the rest."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
