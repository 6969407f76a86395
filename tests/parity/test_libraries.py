# SPDX-License-Identifier: Apache-2.0
"""Which libraries decide on what, and what a provider no longer takes: read from the sources."""

import dataclasses

import pytest

from parity import evidence, libraries
from parity.catalogue import Listed
from parity.checkout import ROOT, Checkout
from parity.features import FEATURES, load
from parity.op_cells import expected
from parity.status import Cell
from vllmx.exceptions import UserError
from vllmx.ir.select import load_ops


def test_what_files_import_decides_on_their_tests(tmp_path):
    (tmp_path / "a.py").write_text("import torch.nn\n\n\ndef f():\n    from xgrammar import x\n")
    (tmp_path / "b.py").write_text("# import triton\nimport torchvision\nfrom .torch import y\n")
    (tmp_path / "c.c").write_text("import numpy\n")
    names = ("a.py", "b.py", "c.c", "absent.py")
    assert libraries.imported(names, tmp_path) == ("torch", "xgrammar")
    (tokens,) = [f for f in Checkout().features if f.id == "tok.bpe"]
    assert {c.kind for c in tokens.cells} >= {"text", "test"}
    assert all("tokenizers" in c.libraries for c in tokens.cells if c.kind in ("text", "test"))


def test_kernels_that_are_compiled_at_the_first_call_depend_on_their_compiler():
    assert libraries.of_kind("op", "triton", "cuda") == ("torch", "numpy", "triton")
    assert libraries.of_kind("op", "torch", "cuda") == ("torch", "numpy")
    assert libraries.of_kind("model", "auto", "cuda")[-1] == "triton"
    assert libraries.of_kind("schedule", "vllmx", "cpu") == ()


def test_the_versions_that_are_asked_for_are_those_of_libraries_that_evidence_tells(tmp_path):
    found = libraries.load(ROOT / "parity" / libraries.FILE)
    assert set(found["cpu"]) >= {"torch", "numpy", "tokenizers"}
    assert set(evidence.run_facts()) >= set(libraries.NAMES)
    path = tmp_path / libraries.FILE
    assert libraries.load(path) == {}
    path.write_text("cpu: {torhc: 2.13.0}\n")
    with pytest.raises(UserError, match="no library torhc"):
        libraries.load(path)
    path.write_text("cpu: {torch: 2.13}\n")
    with pytest.raises(UserError, match="in quotes"):
        libraries.load(path)


def test_a_refusal_of_a_real_provider_is_told_and_a_missing_library_is_none(monkeypatch):
    native = next(c for c in expected("cpu", "op.rms_norm/plain", "native") if c.dtype == "f32")
    shown = Cell(native.feature, native.case_name, "native", "cpu", "eager", "op")
    assert native.refused == "" and Listed(ROOT).refusal(shown) == ""
    impl = load_ops()["rms_norm"].impls["native"]
    monkeypatch.setattr(impl, "supports", lambda context: "takes nothing today")
    assert Listed(ROOT).refusal(shown) == "takes nothing today"
    assert shown.key not in {c.key for c in Listed(ROOT).ops("rms_norm")}
    monkeypatch.setattr(impl, "supports", lambda context: True)
    monkeypatch.setattr(impl, "supported", "there is no compiler here")
    assert Listed(ROOT).refusal(shown) == ""
    gone = dataclasses.replace(shown, provider="cublas")
    assert Listed(ROOT).refusal(gone) == "there is no provider cublas any more"
    assert Listed(ROOT).refusal(dataclasses.replace(shown, kind="model")) == ""


def test_what_is_dropped_needs_op_provider_and_reason(tmp_path):
    (tmp_path / "features.yaml").write_text(
        "layers.core: {ours: [vllmx/x.py], dropped: [op.rms_norm native]}\n"
    )
    with pytest.raises(UserError, match="needs op, provider and the reason"):
        load(features=tmp_path / "features.yaml")
    assert all(len(words.split()) >= 4 for row in load(features=FEATURES) for words in row.dropped)
