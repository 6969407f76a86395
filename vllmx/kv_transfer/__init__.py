# SPDX-License-Identifier: Apache-2.0
"""KV connectors: KV entries that come from, and go to, somewhere outside the engine."""
