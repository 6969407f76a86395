# SPDX-License-Identifier: Apache-2.0
"""The op table: what each op means, and who can compute it."""
