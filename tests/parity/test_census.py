# SPDX-License-Identifier: Apache-2.0
"""A census counts what is public, in any packing, and a drift names our files."""

import json
import tarfile
import zipfile

import pytest

from parity import census, drift
from parity.census import load, render, take
from parity.drift import anchor_patterns, anchors, braces, follow
from parity.source_archive import read_sources
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

OLD = {
    "vllm/__init__.py": "",
    "vllm/core.py": "class Pool:\n    size: int = 1\n    def take(self):\n        return 1\n"
    "    def _hidden(self):\n        return 2\n\ndef free():\n    return 3\n\n"
    "def _no():\n    pass\n",
    "vllm/gone.py": "def old():\n    pass\n",
    "vllm/kernels.py": "import triton\n@triton.jit\ndef _add(x):\n    pass\n"
    '@CustomOp.register("rms_norm")\nclass RMSNorm: pass\n'
    'direct_register_custom_op(op_name="fused_moe")\n',
    "vllm/metrics.py": 'NAME = "vllm:num_requests_running"\n',
    "vllm/cli.py": 'parser.add_argument("--port")\n',
    "vllm/engine/arg_utils.py": "class EngineArgs:\n    max_num_seqs: int = 1\n    _x: int = 2\n"
    "    def from_cli(self): pass\n",
    "vllm/model_executor/models/registry.py": '_TEXT_MODELS = {"A": ("a", "A")}\n'
    '_PREVIOUSLY_SUPPORTED_MODELS = {"Gone": "0.1"}\n_ALL_MODELS = {**_TEXT_MODELS}\n',
    "vllm/model_executor/layers/quantization/__init__.py": "from typing import Literal\n"
    'QuantizationMethods = Literal["fp8", "awq"]\n',
    "csrc/ops.cpp": 'ops.def(\n    "silu_and_mul(Tensor! out) -> ()");\nops.def("init", &init);\n',
    "tests/test_core.py": "def test(): pass\n",
    "PKG-INFO": "Name: vllm\nVersion: 1.0.0\n",
}
NEW = {
    **{name: text for name, text in OLD.items() if name != "vllm/gone.py"},
    "vllm/core.py": OLD["vllm/core.py"].replace("return 1", "return 11") + "def more(): pass\n",
    "vllm/cli.py": OLD["vllm/cli.py"] + "# a word\n",
    "vllm/new.py": "def fresh(): pass\n",
    "vllm/model_executor/models/registry.py": '_TEXT_MODELS = {"B": ("b", "B")}\n',
    "PKG-INFO": "Name: vllm\nVersion: 1.1.0\n",
}


def put(folder, files):
    """Write `files` into `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(params=["folder", "inside", "tar", "zip"])
def place(request, tmp_path):
    """The old sources in each packing."""
    folder = put(tmp_path / "vllm-1.0.0", OLD)
    if request.param == "folder":
        return folder
    if request.param == "inside":
        return tmp_path
    path = tmp_path / f"a.{request.param}"
    if request.param == "tar":
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, "vllm-1.0.0")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name in OLD:
                archive.write(folder / name, f"vllm-1.0.0/{name}")
    return path


def test_every_packing_gives_the_same_census(place):
    version, sources = read_sources(str(place))
    assert version == "1.0.0"
    assert sources == {k: v for k, v in OLD.items() if k.startswith(("vllm/", "csrc/"))}


def test_what_is_counted():
    found = take(("1.0.0", OLD))
    assert found.ops == {"triton:_add", "rms_norm", "fused_moe", "silu_and_mul", "init"}
    assert found.architectures == {"A"}
    assert found.quantization == {"fp8", "awq"}
    assert found.metrics == {"vllm:num_requests_running"}
    assert found.flags == {"--port", "--max-num-seqs"}
    assert found.modules["vllm/core.py"][1] == ("Pool", "free")
    assert set(found.symbols["vllm/core.py"]) == {"Pool", "Pool.size", "Pool.take", "free"}


def test_layout_and_comments_are_no_change():
    texts = {"vllm/a.py": "x = 1\n"}
    other = {"vllm/a.py": "# word\nx  =  1\n"}
    assert take(("1", texts)).modules == take(("1", other)).modules
    assert take(("1", texts)).modules != take(("1", {"vllm/a.py": "x = 2\n"})).modules


def test_a_census_is_read_as_it_was_written(tmp_path):
    found = take(("1.0.0", OLD))
    path = tmp_path / "c.json"
    path.write_text(render(found))
    again = load(path)
    assert render(again) == render(found) and again.modules == found.modules
    path.write_text("{")
    with pytest.raises(UserError, match="no census"):
        load(path)


def test_the_committed_census_is_of_the_pinned_version():
    found = load()
    assert found.version == census.PINNED
    assert len(found.modules) > 2000
    assert "Scheduler" in found.modules["vllm/v1/core/sched/scheduler.py"][1]
    assert {"fp8", "awq"} <= found.quantization and "LlamaForCausalLM" in found.architectures
    assert {"--max-model-len", "--port"} <= found.flags
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= found.metrics
    assert {"rms_norm", "silu_and_mul", "gptq_gemm"} <= found.ops


# ---------------------------------------------------------------------- drift


@pytest.fixture
def ours(tmp_path):
    """A checkout that follows some of upstream's files."""
    root = tmp_path / "ours"
    put(
        root,
        {
            "vllmx/pool.py": "# SPDX\n# upstream: vllm/{core,gone}.py (Pool) @ v1.0.0\n",
            "vllmx/all.py": "# SPDX\n# upstream: vllm/model_executor/models/ @ v1.0.0\n",
            "vllmx/other.py": "# SPDX\n# upstream: vllm/cli.py,\n#   vllm/metrics.py @ v1.0.0\n",
            "parity/inventory.tsv": "id\ttier\tfeature\tupstream\n"
            "kv.pool\tT0\tPool\tcore.py\nmodel.a\tT1\tA\tmodels/registry.py\n",
        },
    )
    return root


def test_a_drift_names_what_changed_and_our_files(ours):
    old, new = (
        (version, {k: v for k, v in files.items() if k != "PKG-INFO"})
        for version, files in (("1.0.0", OLD), ("1.1.0", NEW))
    )
    found = drift.drift(take(old), take(new), ours)
    assert (found["from"], found["to"]) == ("1.0.0", "1.1.0")
    assert found["files"] == {
        "new": ["vllm/new.py"],
        "gone": ["vllm/gone.py"],
        "changed": ["vllm/core.py", "vllm/model_executor/models/registry.py"],
    }
    kinds = {kind["kind"]: (kind["new"], kind["gone"]) for kind in found["kinds"]}
    assert kinds["architectures"] == (["B"], ["A"]) and kinds["metrics"] == ([], [])
    assert found["symbols"]["vllm/core.py"] == {
        "new": ["more"],
        "gone": [],
        "changed": ["Pool.take"],
    }
    assert found["ours"]["vllm/core.py"] == {"ours": ["vllmx/pool.py"], "features": ["kv.pool"]}
    assert found["ours"]["vllm/gone.py"]["ours"] == ["vllmx/pool.py"]
    registry = found["ours"]["vllm/model_executor/models/registry.py"]
    assert registry == {"ours": ["vllmx/all.py"], "features": ["model.a"]}
    words = "\n".join(drift.lines(found))
    assert "our files touched: 2" in words and "~Pool.take, +more" in words
    assert "vllmx/other.py" not in words


def test_anchors_spell_out_braces_lists_and_folders():
    text = "# upstream: vllm/a/{b, c}.py (X, Y), csrc/d.cu @ v1.0.0\n"
    assert anchor_patterns(text) == ["vllm/a/b.py", "vllm/a/c.py", "csrc/d.cu"]
    assert anchor_patterns("# upstream: vllm/a/ @ v1.0.0\n") == ["vllm/a/*"]
    assert anchor_patterns("# upstream: vllm/a.py,\n#   vllm/b.py @ v1.0.0\n") == [
        "vllm/a.py",
        "vllm/b.py",
    ]
    assert braces("x/{a,b}_{c,d}.py") == ["x/a_c.py", "x/a_d.py", "x/b_c.py", "x/b_d.py"]


def test_the_real_files_are_found_by_anchor_map_and_inventory():
    found = anchors(drift.ROOT)
    assert "vllmx/core/scheduler.py" in found["vllm/v1/core/sched/scheduler.py"]
    assert "vllmx/core/block_pool.py" in found["vllm/v1/core/block_pool.py"]
    hits = follow(["vllm/v1/core/block_pool.py", "vllm/nothing.py"], found, drift.ROOT)
    assert "kv.block_pool" in hits["vllm/v1/core/block_pool.py"]["features"]
    assert hits["vllm/nothing.py"] == {"ours": [], "features": []}


def call(**options):
    """The exit code of the verb."""
    config = RunConfig()
    for name, value in options.items():
        setattr(config.parity, name, value)
    return census.run(config)


def test_the_verb_writes_checks_and_compares(tmp_path, capsys):
    old, new = put(tmp_path / "old", OLD), put(tmp_path / "new", NEW)
    out = {"from_version": str(old), "output_dir": str(tmp_path)}
    assert call(**out, check=True) == 1
    assert call(**out) == 0 and call(**out, check=True) == 0
    assert call(from_version=str(old), to_version=str(old)) == 0
    capsys.readouterr()
    assert call(**out, to_version=str(new), json=True) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads((tmp_path / "upstream_drift.json").read_text())


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_place_without_sources_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="census"):
        read_sources(str(tmp_path / name))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UserError, match="neither a tar nor a zip"):
        read_sources(str(tmp_path / "text"))
