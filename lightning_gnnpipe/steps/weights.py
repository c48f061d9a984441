"""A rank's weights: parameters of other stages are emptied, and filled again on demand.

An emptied parameter is the same object without data, of as many dimensions, for code that groups
them by `p.ndim`. Every rank keeps all buffers, which are small; the owner's values count.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gnnpipe._compat_torch import resize
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.steps.tables import Tables

Users = Mapping[str, set[int]]  # stages of each tensor, by name


def check_same(before: Users, users: Users) -> None:
    """Refuse a batch that makes a stage use new weights: other replicas would not know."""
    changed = sorted(name for name in users if users[name] != before.get(name))
    if changed:
        raise UnsupportedError(
            expected="every batch to use the same weights in the same stages, with data_parallel",
            found=f"a batch that uses '{changed[0]}' in stages {sorted(users[changed[0]])}",
            remedy="Give all batches the same attributes, or use data_parallel=1.",
        )


def check_leaves(module: nn.Module) -> None:
    """Refuse computed tensors as weights: gradients would end at them."""
    computed = (name for name, parameter in module.named_parameters() if not parameter.is_leaf)
    name = next(computed, None) if torch.is_grad_enabled() else None
    if name is not None:
        raise UnsupportedError(
            expected="the weights of the pipelined module to be parameters",
            found=f"a computed tensor as '{name}', for example from functional_call",
            remedy="Call the module in torch.no_grad(), or call a copy of it that you make in "
            "__init__.",
        )


def check_shared(shared_outside: Mapping[int, str], module: nn.Module, users: Users) -> None:
    """Refuse weights of stages that outside modules use; `shared_outside`: names by id."""
    for name, parameter in module.named_parameters():
        if name in users and id(parameter) in shared_outside:
            raise UnsupportedError(
                expected="no weights of the pipelined module in layers outside of it",
                found=f"'{name}', which is also '{shared_outside[id(parameter)]}'",
                remedy="Put both layers into the pipelined module, or use one stage.",
            )


class StageWeights:
    """A module's parameters and buffers; this rank may hold its stage's and shard's alone."""

    def __init__(self, module: nn.Module, transport: Transport, tables: Tables) -> None:
        self.module = module
        self._transport, self._tables = transport, tables
        self._shapes: dict[str, torch.Size] = {}  # of emptied and of cut parameters
        self._assigned: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []

    def check_kept(self) -> None:
        """Refuse parameters replaced since the split, where a rank lacks some."""
        if self._transport.mesh.num_stages == 1 and not self._tables.names:
            return
        for name, parameter in self.module.named_parameters():
            if self._assigned.get(name, parameter) is not parameter:
                raise UnsupportedError(
                    expected="no parameter to be replaced during the run",
                    found=f"a new tensor as '{name}'",
                    remedy="Change parameters in place (parameter.copy_(...) in torch.no_grad()), "
                    "or use one stage. With several stages, layers cannot be replaced, and "
                    "functional_call cannot give them other weights.",
                )

    @property
    def is_partial(self) -> bool:
        """Whether data of some parameters is on other ranks only."""
        _check_present(self._shapes, self._tensors())
        return bool(self._shapes)

    def foreign(self, users: Users) -> dict[str, nn.Parameter]:
        """Return parameters that only other stages use, scalars included, by name."""
        here = self._transport.mesh.stage
        named = self.module.named_parameters()
        return {name: p for name, p in named if here not in users.get(name, {here})}

    def shape_of(self, name: str, parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Return the full shape and the dtype of tensor `name`."""
        return self._shapes.get(name, parameter.shape), parameter.dtype

    def empty(self, users: Users) -> None:
        """Empty the parameters of other stages, and cut tables to the rows of this shard."""
        self._shapes = {}
        for name, parameter in self.foreign(users).items():
            parameter.grad = None
            if parameter.dim():  # scalars cannot be emptied
                self._shapes[name] = parameter.shape
                parameter.data = parameter.data.new_empty((0, *parameter.shape[1:]))
        for name, parameter in self.divided().items():
            if name not in self._shapes:
                grad, self._shapes[name] = parameter.grad, parameter.shape
                resize(parameter, self._tables.piece(parameter.data))
                parameter.grad = None if grad is None else self._tables.piece(grad)
        self._tables.is_cut = True
        self._assigned = dict(self.module.named_parameters())
        if self._shapes and not self._hooks:
            modules: list[Any] = list(self.module.modules())
            self._hooks = [m.register_load_state_dict_pre_hook(self._take_own) for m in modules]

    def divided(self) -> dict[str, nn.Parameter]:
        """Return the divided tables, cut or not, by name."""
        return {n: p for n, p in self.module.named_parameters() if n in self._tables}

    def named(self, names: Container[str]) -> dict[str, Tensor]:
        """Return tensors by name, as they are on this rank."""
        return {name: tensor for name, tensor in self._tensors().items() if name in names}

    def assemble(self, users: Users) -> dict[str, Tensor]:
        """Return the full tensors of all stages on every rank; collective."""
        named = self._tensors()
        if self._transport.mesh.num_stages > 1:
            _check_present(users, named)
        users = {name: stages for name, stages in users.items() if name in named}
        return self._share(users, named, named)

    def assemble_gradients(self, users: Users) -> dict[str, Tensor | None]:
        """Return the gradients that only other stages have; collective."""
        parameters = {n: p for n, p in self.module.named_parameters() if n in users}
        mesh, here = self._transport.mesh, self._transport.world.rank
        owners = {name: mesh.rank_of(min(users[name]), 0) for name in parameters}
        forms = self._transport.all_gather_objects(
            [0 if p.grad is None else 1 + p.grad.is_sparse for p in parameters.values()]
        )
        numbers = {rank: forms[i] for i, rank in enumerate(self._transport.members.ranks)}
        form = {name: numbers[owner][i] for i, (name, owner) in enumerate(owners.items())}
        own = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        own = {n: grad for n, grad in own.items() if n in self._tables or owners[n] == here}
        grads = self._share(
            {name: users[name] for name in owners if form[name]},
            {name: grad.to_dense() if grad.is_sparse else grad for name, grad in own.items()},
            parameters,
        )
        return {
            name: grads[name].to_sparse(1) if form[name] > 1 else grads.get(name)
            for name in parameters
            if mesh.stage not in users[name] or name in self._shapes
        }

    def _share(
        self, users: Users, own: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return full tensors, each of its first stage, where it is in `own`; collective."""
        rank_of, here = self._transport.mesh.rank_of, self._transport.mesh.shard
        owners, local, shapes, tables = {}, {}, {}, dict[str, list[str]]()
        for name, stages in users.items():
            shape, dtype = self.shape_of(name, like[name])
            keys = [name]
            if name in self._tables:
                keys = tables[name] = [f"{name}[{i}]" for i in range(len(self._tables.sizes))]
            for shard, key in enumerate(keys):
                owners[key] = rank_of(min(stages), shard)
                rows = self._tables.sizes[shard : shard + 1] if name in tables else shape[:1]
                shapes[key] = torch.Size((*rows, *shape[1:])), dtype
            if name in own and name in tables:
                is_cut = name in self._shapes
                local[keys[here]] = own[name] if is_cut else self._tables.piece(own[name])
            elif name in own:
                local[name] = own[name]
        shared = self._transport.share_tensors(owners, local, shapes)
        for name, keys in tables.items():
            shared[name] = self._tables.join([shared.pop(key) for key in keys])
        return shared

    def fill(self, users: Users) -> None:
        """Give this rank all parameters, the owners' buffers, gradients of tables; collective."""
        tables = {name: users[name] for name in users if name in self._tables}
        stage = self._transport.mesh.stage
        grads = self.assemble_gradients(tables) if tables else {}
        grads = {name: grad for name, grad in grads.items() if min(users[name]) == stage}
        named, everywhere = self._tensors(), set(range(self._transport.mesh.num_stages))
        differs = {  # tensors of which ranks may have different data
            name: stages
            for name, stages in users.items()
            if name in tables or stages != everywhere or not _can_be_empty(named.get(name))
        }
        self.take(self.assemble(differs), grads)

    def take(self, tensors: Mapping[str, Tensor], grads: Mapping[str, Tensor | None]) -> None:
        """Write assembled tensors, and gradients of other stages' parameters."""
        parameters = dict(self.module.named_parameters())
        for name in self._shapes:
            parameter, data = parameters[name], tensors[name].to(parameters[name].device)
            if name in self._tables:
                resize(parameter, data)
            else:
                parameter.data = data
        with torch.no_grad():
            for name, tensor in self.named(tensors).items():
                if not _can_be_empty(tensor) and not torch.equal(tensor, tensors[name]):
                    tensor.copy_(tensors[name])  # only then: autograd may have saved it
        for name, grad in grads.items():
            parameters[name].grad = grad
        self._tables.is_cut = False
        self.forget()

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def forget(self) -> None:
        self._shapes, self._assigned = {}, {}
        while self._hooks:
            self._hooks.pop().remove()

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Let a module with placeholders load a whole state dict."""
        cut = {id(p) for name, p in self.divided().items() if name in self._shapes}
        for name, parameter in module.named_parameters(recurse=False):
            given = state.get(prefix + name)
            if not isinstance(given, Tensor) or not given.dim():
                continue
            if parameter.shape[:1] == (0,):
                state[prefix + name] = given[:0]
            elif id(parameter) in cut:
                state[prefix + name] = self._tables.piece(given)


def _check_present(names: Iterable[str], found: Mapping[str, Tensor]) -> None:
    """Refuse to continue if a callback has replaced or removed a tensor."""
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise UnsupportedError(
            expected="no parameter or buffer to be removed during the run",
            found=f"no '{missing}'",
            remedy="Callbacks that replace them, such as ModelPruning, need one stage.",
        )


def _can_be_empty(tensor: Tensor | None) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dim() > 0
