# SPDX-License-Identifier: Apache-2.0
"""The attention of each request of a batch beside that of the request alone."""

import torch

from vllmx.ir.select import load_ops


def assert_alone_as_together(provider: str, given: dict) -> None:
    """The provider's batch-invariant kernel gives each request of `given` the same bits alone."""
    impl = load_ops()["paged_attention"].impls[provider]
    together = impl.invariant_fn(**given)
    starts = given["query_start_loc"].tolist()
    for row in range(len(starts) - 1):
        span = slice(starts[row], starts[row + 1])
        one = {**given, "query": given["query"][span]}
        one["query_start_loc"] = torch.tensor([0, span.stop - span.start], dtype=torch.int32)
        for name in ("block_table", "seq_lens"):
            one[name] = given[name][row : row + 1]
        assert torch.equal(impl.invariant_fn(**one), together[span])
