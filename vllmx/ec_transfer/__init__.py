# SPDX-License-Identifier: Apache-2.0
"""Encoder outputs that come from, or go to, another engine."""
