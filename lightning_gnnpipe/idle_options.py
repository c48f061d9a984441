"""Refuses options that have no effect beside the other options, on any devices and any graph.

Not refused are options that

- only have no effect on the present devices, so that a script runs on one device and on eight:
  `cut_codec` and `repeat_encoder` with num_stages="auto", `start_method`, `timeout`;
- have no effect with `num_chunks=1`, the exact baseline of scripts: one warning names them;
- ask for what happens anyway: `guard=False`, `self_check=False`, `balance="uniform"`, and the
  callback `StalenessWarmup` if every step is exact.

An option with its default value counts as not given.
"""

from __future__ import annotations

from typing import Any

from lightning_gnnpipe.errors import ConfigError, explain

_DEFAULTS: dict[str, Any] = {
    "partition": "metis",
    "chunk_order": "shuffled",
    "cross_chunk_edges": "keep",
    "staleness": "drift",
    "history_dtype": None,
    "history_device": None,
    "num_virtual": 2,
    "halo_codec": "fp32",
    "cut_codec": "fp32",
    "async_halo": False,
    "repeat_encoder": "auto",
}
_OF_CHUNKS = ("partition", "chunk_order", "cross_chunk_edges")
_OF_ROWS = ("staleness", "history_dtype", "history_device")


def check_idle(given: Any) -> None:
    """Raise ConfigError if an option in `given`, the `StrategyOptions`, has no effect."""
    if for_graphs(given):
        why = "graphs of a batch are not cut into chunks, and none of their rows is stale"
        _refuse(given, (*_OF_CHUNKS, *_OF_ROWS), for_graphs(given), why, "drop the other")
    if given.graph_parallel == 1:
        why = "there are no shards that would swap rows"
        names = ("halo_codec", "async_halo")
        _refuse(given, names, "graph_parallel=1", why, "use graph_parallel=2 or more")
    if given.num_stages == 1:
        why = "there is no other stage to send anything to"
        names = ("cut_codec", "repeat_encoder")
        _refuse(given, names, "num_stages=1", why, "leave num_stages at 'auto'")
    if given.schedule != "interleaved":
        setting, use = f"schedule={given.schedule!r}", "use schedule='interleaved'"
        _refuse(given, ("num_virtual",), setting, "each rank has one stage", use)


def idle_in_one_chunk(given: Any) -> list[str]:
    """Return the names of given options without effect, if there is one chunk."""
    has_rows = given.async_halo or (given.recompute and given.graph_parallel > 1)
    names = _OF_CHUNKS if has_rows else (*_OF_CHUNKS, *_OF_ROWS)
    is_one = given.num_chunks == 1
    return [name for name in names if is_one and not _is_default(name, getattr(given, name))]


def for_graphs(given: Any) -> str:
    """Return the option that requires batches of graphs; "" if there is none."""
    if given.data_parallel > 1:
        return f"data_parallel={given.data_parallel}"
    return "" if given.schedule == "fill_drain" else f"schedule={given.schedule!r}"


def _refuse(given: Any, names: tuple[str, ...], setting: str, why: str, use: str) -> None:
    for name in names:
        value = getattr(given, name)
        if not _is_default(name, value):
            raise ConfigError(
                explain(
                    expected=f"'{name}' to be left out with {setting}",
                    found=repr(value),
                    remedy=f"It would change nothing, since {why}. Leave it out, or {use}.",
                )
            )


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    if name.endswith("codec"):
        return {*([value] if isinstance(value, str) else value)} == {default}
    if name == "partition":  # a tensor is checked against the number of chunks
        return not isinstance(value, str) or value == default
    if name == "repeat_encoder":
        return value is not True
    return bool(value == default)
