# SPDX-License-Identifier: Apache-2.0
"""What `import vllm` finds in a process that a test starts: it lays the map there as well."""

import importlib
import os
import sys
from pathlib import Path

from parity.upstream_shim.finder import install
from parity.upstream_shim.mapping import load_map

install(load_map(Path(os.environ["UPSTREAM_MAP"])))
del sys.modules[__name__]
sys.modules[__name__] = importlib.import_module(__name__)
