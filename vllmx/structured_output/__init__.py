# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: answers that a grammar constrains."""
