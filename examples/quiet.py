"""Keep Lightning's notices off the screen of an example; warnings of our own stay."""

from __future__ import annotations

import logging
import warnings


def silence_lightning() -> None:
    """Leave the screen to the progress bar and the results."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in ("Checkpoint directory.*not empty", ".*LeafSpec.*is deprecated"):
        warnings.filterwarnings("ignore", message=message)
