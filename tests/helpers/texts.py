"""What no text for users may have: names of the package's insides, and of torch.fx's."""

from __future__ import annotations

import re

INSIDES = re.compile(
    r"\bleaf_\d|Value\(|Kind\.|%\w+|\bmodule_\w+|Proxy|num_users|call_(module|function)|_Slot|Segment"
)
