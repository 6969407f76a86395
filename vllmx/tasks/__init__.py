# SPDX-License-Identifier: Apache-2.0
"""One module a command; `run(config, started)` carries it out and returns the exit code."""
