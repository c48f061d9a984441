"""Norms with running statistics, which one stage alone may update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_gnnpipe.errors import UnsupportedError, explain


def stages_of_norms(
    norms: Mapping[str, nn.Module], users: Mapping[str, set[int]]
) -> dict[str, set[int]]:
    """Return the stages of each norm whose running statistics several stages would update.

    Args:
        norms: Norms by name.
        users: The stages of each parameter and buffer, by name.
    """
    found = {name: users.get(f"{name}.running_mean", set()) for name in norms}
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def check_norms(norms: Mapping[str, nn.Module], users: Mapping[str, set[int]]) -> None:
    """Refuse running statistics that several stages would each update on their own.

    Raises:
        UnsupportedError: With the first such norm.
    """
    for name, stages in stages_of_norms(norms, users).items():
        raise UnsupportedError(
            explain(
                expected="a norm with running statistics to be called by one stage",
                found=f"'{name}', a {type(norms[name]).__name__}, in stages {sorted(stages)}",
                remedy="Give each layer a norm of its own.",
            )
        )
