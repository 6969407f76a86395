# SPDX-License-Identifier: Apache-2.0
"""Tables of rotation angles for each kind of scaling that vllmx has."""

from __future__ import annotations

from typing import Any

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
ROWS = [0, 1, 2, 63, 255, 256, 257, 1023, 2047, 4095, 4096, 8191]

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 2048,
    "short_factor": [1.0 + 0.02 * i for i in range(48)],
    "long_factor": [1.0 + 0.75 * i for i in range(48)],
}
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
    "yarn_tuned": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 24,
        "beta_slow": 2,
        "attn_factor": 0.9,
        "extrapolation_factor": 0.8,
        "truncate": False,
    },
    "yarn_unscaled": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "apply_yarn_scaling": False,
    },
    "longrope_short": {**LONGROPE, "max_model_len": 2048},
    "longrope_long": {**LONGROPE, "max_model_len": 8192},
    "longrope_scaled": {**LONGROPE, "max_model_len": 8192, "long_mscale": 1.25},
    "dynamic_alpha": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 8.0},
    "dynamic_factor": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "max_trained_positions": 2048,
    },
    "dynamic_untrained": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "ntk": {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0},
    "ntk_mixed": {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 4.0, "mixed_b": 0.6},
    "rope_dim": {"rope_type": "default", "rope_theta": 10000.0, "rope_dim": 48},
}


def _add(name: str, parameters: dict[str, Any]) -> None:
    @CASES.add("rope_table", name, dtypes=("f32",), cells=(parameters["rope_type"],))
    def _(m: Maker) -> Arguments:
        return {
            "head_size": 128,
            "max_position": 8192,
            "rope_parameters": parameters,
            "rows": m.ints([row for row in ROWS if row < parameters.get("max_model_len", 8192)]),
        }


for _name, _parameters in KINDS.items():
    _add(_name, _parameters)
