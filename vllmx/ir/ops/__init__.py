# SPDX-License-Identifier: Apache-2.0
"""Definitions of the ops, one file a family."""
