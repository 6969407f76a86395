# SPDX-License-Identifier: Apache-2.0
"""No limit of an op is widened unseen: neither in the policy, nor by the noise it multiplies."""

from dataclasses import astuple

import numpy as np
import pytest
import yaml

from parity import floor_cap, policy
from parity.compare import Floor
from parity.dtypes import array, rounded

RED = {
    **dict.fromkeys(
        ("norm", "pointwise", "rope", "table", "gemm", "attention", "probs", "noise", "moe"),
        (2, 4, 4, 8),
    ),
    "scan": (3, 6, 8, 8),
}
DRIFT = {"default": (1.6, 3, 4, 4.5), "attention": (1.6, 3, 4, 7)}
OVERRIDES = {("qk_norm_rope_decode", "torch", "f32", "cuda"): (2, 5, 4, 8)}


def wider(found: policy.Policy) -> list[str]:
    """What `found` allows and the numbers above do not."""
    overrides = {
        tuple(entry[name] for name in ("op", "provider", "dtype", "device")): policy.Limits(
            **entry["limits"]
        )
        for entry in found.overrides
    }
    tables = ((found.red, RED), (found.drift, DRIFT), (overrides, OVERRIDES))
    return [
        str(name)
        for table, was in tables
        for name, limits in table.items()
        if name not in was or any(now > then for now, then in zip(astuple(limits), was[name]))
    ]


def test_no_limit_of_an_op_is_wider_than_it_was():
    assert wider(policy.load()) == []


@pytest.mark.parametrize(
    ("where", "name"), [("red", "pointwise"), ("red", "scan"), ("drift", "default"), ("red", "new")]
)
def test_a_wider_limit_or_one_more_is_seen(tmp_path, where, name):
    raw = yaml.safe_load(policy.POLICY.read_text())
    limits = raw[where].get(name, raw[where]["norm" if where == "red" else "default"])
    raw[where][name] = {**limits, "rmse": limits["rmse"] + 0.1}
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert wider(policy.load(path)) == [name]


def test_an_override_more_is_seen(tmp_path):
    raw = yaml.safe_load(policy.POLICY.read_text())
    raw["overrides"].append({**raw["overrides"][0], "op": "*"})
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert wider(policy.load(path)) == ["('*', 'torch', 'f32', 'cuda')"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("figure", sorted(floor_cap.CAPS))
def test_a_floor_above_any_noise_of_an_oracle_is_not_believed(dtype, figure):
    truth = np.random.default_rng(0).standard_normal((8, 256))
    golden = array(rounded(truth, dtype), dtype)
    step = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype]
    # Of independent errors of one step the gain is off by this.
    unit = step / np.sqrt(truth.size) if figure == "gain" else step
    cap = floor_cap.CAPS[figure]
    assert floor_cap.fault(Floor(**{figure: 0.2 * cap * unit}), golden, truth, dtype) == ""
    told = floor_cap.fault(Floor(**{figure: 5 * cap * unit}), golden, truth, dtype)
    assert told.startswith(f"{figure} ") and f"at most {cap:g} are believed" in told


def test_an_inner_step_of_a_narrower_dtype_is_noise_of_it():
    truth = np.random.default_rng(0).standard_normal((8, 256))
    golden, lane = array(truth, "f32"), Floor(rmse=0.004)
    assert floor_cap.fault(lane, golden, truth, "bf16") == ""
    assert floor_cap.fault(lane, golden, truth, "f32").startswith("rmse 0.004")
