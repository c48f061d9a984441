"""Names of layers, as users know them."""

from __future__ import annotations

from torch import nn

from lightning_gnnpipe.passing import find_convs
from lightning_gnnpipe.stages import Segment, line_of_node, strip_root


class LayerNames:
    """Finds the message-passing layers of `module` in its segments."""

    def __init__(self, module: nn.Module) -> None:
        self._convs = {id(conv): name for name, conv in find_convs(module).items()}

    def of(self, segment: Segment) -> str:
        """Return the names of the message-passing layers in `segment`."""
        names = [self._convs[id(m)] for m in segment.module.modules() if id(m) in self._convs]
        return ", ".join(dict.fromkeys(names)) or f"layer {segment.index}"

    @staticmethod
    def of_repeated(part: Segment) -> tuple[str, ...]:
        """Return the names of what has weights in a part that is computed again, or its lines.

        A weight of no submodule goes by its own name.
        """
        names = [strip_root(name) for name, _ in part.module.named_parameters()]
        owners = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
        lines = (line_of_node(end).partition(",")[0] for end in part.ends.values())
        return tuple(owners) or tuple(dict.fromkeys(lines))
