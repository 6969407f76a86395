# SPDX-License-Identifier: Apache-2.0
"""Models with gated delta nets against transformers in float32, states and all."""

import random
from pathlib import Path

import pytest
import torch
from checkpoints import HYBRID, VOCAB, save_tiny
from hybrid_driver import HybridDriver


def sequence(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def logits_of(twin: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return twin(torch.tensor([tokens])).logits[0].float()


@pytest.fixture(scope="module", params=sorted(HYBRID))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("hybrid") / request.param
    return folder, save_tiny(request.param, folder)


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 130])
def test_a_prompt_in_one_go_equals_transformers(hybrid: tuple, length: int) -> None:
    folder, twin = hybrid
    tokens = sequence(length)
    got = HybridDriver(folder).step({0: tokens})[0]
    torch.testing.assert_close(got, logits_of(twin, tokens), atol=5e-5, rtol=1e-4)


def test_token_by_token_equals_transformers(hybrid: tuple) -> None:
    folder, twin = hybrid
    tokens, driver = sequence(40), HybridDriver(folder)
    got = torch.cat([driver.step({0: [token]})[0] for token in tokens])
    torch.testing.assert_close(got, logits_of(twin, tokens), atol=5e-5, rtol=1e-4)


def test_pieces_beside_other_requests_equal_transformers(hybrid: tuple) -> None:
    """Prefills, pieces of prefills and decodes in one batch, also two new one-token prompts."""
    folder, twin = hybrid
    wanted = {r: sequence(n, seed=r) for r, n in enumerate((70, 23, 9, 30))}
    pieces = {0: [50, 1, 19], 1: [1, 1, 21], 2: [0, 1, 8], 3: [20, 9, 1]}
    driver = HybridDriver(folder)
    found: dict[int, list] = {r: [] for r in wanted}
    for step in range(3):
        batch = {}
        for r, sizes in pieces.items():
            start = sum(sizes[:step])
            if sizes[step]:
                batch[r] = wanted[r][start : start + sizes[step]]
        for r, logits in driver.step(batch).items():
            found[r].append(logits)
    for r, tokens in wanted.items():
        want = logits_of(twin, tokens)
        torch.testing.assert_close(torch.cat(found[r]), want, atol=5e-5, rtol=1e-4)
