# SPDX-License-Identifier: Apache-2.0
"""The rules of rules.py hold, and each of them finds what it is there to find."""

from collections.abc import Callable

import pytest
import rules
from rules import Source

HEAD = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_rule(rule: Callable) -> None:
    assert rules.breaches(rule) == []


def test_no_committed_file_names_a_machine_or_registry() -> None:
    assert rules.private_breaches() == []


BAD = [
    (rules.spdx_line, "vllmx/x.py", '"""No licence."""\n'),
    (rules.upstream_anchor, "vllmx/x.py", HEAD + "# upstream: somewhere\n"),
    (rules.docstrings, "vllmx/x.py", "def f() -> None:\n    return None\n"),
    (rules.docstrings, "vllmx/x.py", 'class A:\n    """Doc."""\n    def f(self): ...\n'),
    (rules.config_docstrings, "vllmx/config.py", "class A:\n    x: int = 1\n    y: int = 2\n"),
    (rules.no_environ, "vllmx/x.py", "import os\nos.environ['A']\n"),
    (rules.no_environ, "vllmx/x.py", "import os\nos.getenv('A')\n"),
    (rules.hydra_in_one_file, "vllmx/cli.py", "def f():\n    from omegaconf import DictConfig\n"),
    (rules.core_without_torch, "vllmx/core/x.py", "def f():\n    import torch.nn\n"),
    (rules.no_heavy_package, "vllmx/x.py", "from transformers import AutoTokenizer\n"),
    (rules.oracles_alone, "oracles/x.py", "from vllmx.models import hf_config\n"),
    (rules.layers, "vllmx/layers/linear.py", "from vllmx.entrypoints import llm\n"),
    (rules.layers, "vllmx/core/x.py", "from vllmx.layers import linear\n"),
    (rules.layers, "vllmx/config.py", "from vllmx.layers import linear\n"),
    (rules.no_marks, "vllmx/x.py", "# TO" + "DO later\n"),
    (rules.clock_of_one_module, "tests/x.py", "patch.setattr(replay.time, 'monotonic', f)\n"),
    (rules.clock_of_one_module, "tests/x.py", "patch.setattr('time.monotonic_ns', f)\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_finds_a_breach(rule: Callable, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


GOOD = [
    (rules.upstream_anchor, "vllmx/x.py", HEAD + "# upstream: vllm/config/*.py @ v0.25.0\n"),
    (rules.docstrings, "vllmx/x.py", "def _f() -> None:\n    return None\n"),
    (rules.core_without_torch, "vllmx/layers/x.py", "import torch\n"),
    (
        rules.layers,
        "vllmx/core/x.py",
        "if TYPE_CHECKING:\n    from vllmx.layers import linear\n",
    ),
    (rules.layers, "vllmx/entrypoints/llm.py", "from vllmx.layers import linear\n"),
    (rules.clock_of_one_module, "tests/x.py", "patch.setattr(replay, 'time', clock)\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_lets_good_text_pass(rule: Callable, path: str, text: str) -> None:
    assert not list(rule(Source(path, text)))


def test_private_text_is_found() -> None:
    assert list(rules.nothing_private("see /wo" + "rk/shared"))
