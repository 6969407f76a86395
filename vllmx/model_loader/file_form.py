# SPDX-License-Identifier: Apache-2.0
"""What form a file of weights is of, by its first bytes and whatever it is called."""

from __future__ import annotations

from pathlib import Path

ZIP = b"PK\x03\x04"
PICKLE = b"\x80\x02\x8a"
"""How the number begins that torch.save put first before it wrote zip archives."""


def is_safetensors(file: Path) -> bool:
    """Whether `file` begins as safetensors do: the length of a JSON object, and that."""
    with open(file, "rb") as handle:
        start = handle.read(9)
    length = int.from_bytes(start[:8], "little")
    return start[8:] == b"{" and length <= file.stat().st_size


def is_pt(file: Path) -> bool:
    """Whether `file` begins as what torch.save writes: a zip archive, formerly a pickle."""
    return is_zip(file) or _begins(file, PICKLE)


def is_zip(file: Path) -> bool:
    """Whether `file` begins as a zip archive."""
    return _begins(file, ZIP)


def _begins(file: Path, start: bytes) -> bool:
    with open(file, "rb") as handle:
        return handle.read(len(start)) == start
