# SPDX-License-Identifier: Apache-2.0
"""Tables of rotation angles for each kind of scaling that vllmx has."""

from __future__ import annotations

from typing import Any

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
ROWS = [0, 1, 2, 63, 255, 256, 257, 1023, 2047, 4095, 4096, 8191]

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "million": {"rope_type": "default", "rope_theta": 1000000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
}


def _add(name: str, parameters: dict[str, Any]) -> None:
    @CASES.add("rope_table", name, dtypes=("f32",), cells=(parameters["rope_type"],))
    def _(m: Maker) -> Arguments:
        return {
            "head_size": 128,
            "max_position": 8192,
            "rope_parameters": parameters,
            "rows": m.ints(ROWS),
        }


for _name, _parameters in KINDS.items():
    _add(_name, _parameters)
