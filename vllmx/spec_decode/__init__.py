# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens on their way to being verified."""
