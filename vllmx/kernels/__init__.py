# SPDX-License-Identifier: Apache-2.0
"""Providers of ops, one file each; importing a file registers whatever it can serve."""
