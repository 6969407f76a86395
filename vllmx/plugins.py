# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/plugins/__init__.py @ v0.25.0
"""Installed packages that add to vllmx: functions of the entry point group `vllm.general_plugins`.

Each is called once in every process that resolves or loads a model. One that fails is logged and
left out; the others and the engine go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points

from vllmx.platform import plugins_of_upstream

logger = logging.getLogger(__name__)

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
_loaded = False


def load_general_plugins(allowed: Sequence[str] | None = None) -> None:
    """Call the plugins that `allowed` names (None: all that are installed), unless this process
    has done so before, whatever was allowed then. VLLM_PLUGINS decides nothing: where that
    is set and `allowed` is not, a warning says so."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    if allowed is None and (told := plugins_of_upstream()) is not None:
        logger.warning(
            "VLLM_PLUGINS=%s is not read, and all installed plugins are loaded: set load.plugins "
            "(--plugins, or plugins= of LLM) to those that are wanted.",
            told,
        )
    found = entry_points(group=DEFAULT_PLUGINS_GROUP)
    names = sorted({plugin.name for plugin in found})
    for name in sorted(set(allowed or ()) - set(names)):
        logger.warning(
            "load.plugins names %s, which is not installed; there are: %s.",
            name,
            ", ".join(names) or "none",
        )
    for plugin in found:
        if allowed is not None and plugin.name not in allowed:
            continue
        try:
            plugin.load()()
        except Exception:
            logger.exception("Plugin %s (%s) failed and is left out.", plugin.name, plugin.value)
        else:
            logger.debug("Plugin %s (%s) is loaded.", plugin.name, plugin.value)
