# SPDX-License-Identifier: Apache-2.0
"""The one way in which goldens, floors and evidence become bytes and sums of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; ValueError for NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def file_sha(path: Path) -> str:
    """sha256 of the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
