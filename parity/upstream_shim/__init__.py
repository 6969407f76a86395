# SPDX-License-Identifier: Apache-2.0
"""Lays vllmx under upstream's module names, so that upstream's own tests import it.

Runs in a child process only: `pytest -p parity.upstream_shim.plugin` with the checkout on the path.
"""
