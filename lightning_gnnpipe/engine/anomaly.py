"""Why a loss is not finite: the first operation of the network whose result is not.

It is looked for once a loss has shown it, by an exact pass that runs operation by operation. Each
rank watches its own layers; the earliest operation of all ranks is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx

from lightning_gnnpipe._compat_torch import pytree
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.chunks import PassSpec
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.passes import Passes
from lightning_gnnpipe.errors import GNNPipeError
from lightning_gnnpipe.graph import first_not_finite
from lightning_gnnpipe.passing import replace_all
from lightning_gnnpipe.stages import Segment, leaves_of, line_of_node, strip_root
from lightning_gnnpipe.steps import Mode
from lightning_gnnpipe.user_code import at

_NOWHERE = 2**62
_GIVEN = ", which forward reads, is "


class _Watched(fx.Interpreter):
    """Runs a segment; `found` gets its operations whose result is not finite, by their place."""

    def __init__(self, segment: Segment, found: dict[int, str]) -> None:
        super().__init__(segment.module)
        self._found, nodes = found, segment.module.graph.nodes
        self._places = {node: (segment.index << 32) + place for place, node in enumerate(nodes)}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            values = filter(None, map(first_not_finite, pytree.tree_leaves(result)))
            if (value := next(values, None)) is not None:
                self._found.setdefault(self._places[n], f"{self._name(n)} is {value.split()[0]}")
        return result

    def _name(self, node: fx.Node) -> str:
        name = strip_root(str(node.target))
        if node.op == "get_attr":
            return f"'{name}'"
        if node.op != "call_module":
            name = str(getattr(node.target, "__name__", node.target))
            return f"the result of '{name}'{at(line_of_node(node))}"
        layer = self.fetch_attr(str(node.target))
        wrong = (key for key, weight in layer.named_parameters() if first_not_finite(weight))
        weight = next((f" (as is its '{key}')" for key in wrong), "")
        return f"the output of layer '{name}', a {type(layer).__name__}{weight},"


def find_not_finite(
    passes: Passes, transport: Transport, mode: Mode, call: Call, exact: Callable[[], PassSpec]
) -> str | None:
    """Return what is the first that is not finite in a call; None if nothing is; collective.

    `exact` begins an exact pass over the call's input.
    """
    head = [] if mode.layers.head is None else [mode.layers.head]
    read = leaves_of([*mode.layers.segments, *head])
    for slot, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
        if f"leaf_{slot}" in read and (value := first_not_finite(leaf)) is not None:
            return f"'{name}'{_GIVEN}{value}"
    found = dict[int, str]()
    watched = [*mode.stages[transport.mesh.stage].computed, *head]
    with (
        replace_all((one.module, {"forward": _Watched(one, found).run}) for one in watched),
        torch.no_grad(),
    ):
        outputs, _ = passes.run_exact(exact())
        mode.finish(outputs, call)
    place = min(found, default=_NOWHERE)
    places = [one for [one] in transport.meet("find what is not finite", [place])]
    first = places.index(min(places))
    return transport.broadcast_object(found.get(place), transport.members.ranks[first])


def refuse_loss(loss: float, epoch: int, found: str | None) -> NoReturn:
    """Raise GNNPipeError for the loss; `found`: the first that is not finite in forward."""
    why = f": {found}" if found else ", though all outputs of the network are finite"
    remedy = (
        "Keep values in range, as in x.clamp(min=1e-6).log(), lower the learning rate, set "
        "Trainer(gradient_clip_val=1.0), or take precision='bf16-mixed' for '16-mixed'."
        if found
        else "If a step may have such a loss, return one without effect: "
        "return loss if loss.isfinite() else 0 * out.sum()"
    )
    if found and _GIVEN in found:
        remedy = "Clean it before training, as in x.nan_to_num()."
    raise GNNPipeError(
        f"The loss of epoch {epoch} is {loss:g}{why}.\n"
        f"More steps would make all weights nan, so the run ends.\n{remedy}"
    )
