# SPDX-License-Identifier: Apache-2.0
"""More than text: refused at the engine's door by name while no model takes it."""

import numpy as np
import pytest
from engine_helpers import make_config, make_core, make_engine_request

from vllmx.config import ECTransferConfig, ModelConfig
from vllmx.engine.startup import resolve_scheduler_limits
from vllmx.exceptions import UserError
from vllmx.multimodal import MultiModalFeatureSpec, PlaceholderRange


def test_a_request_with_more_than_text_is_refused_by_name():
    core = make_core(make_config())
    request = make_engine_request("a", 8)
    request.mm_features = [MultiModalFeatureSpec(None, "image", "x", PlaceholderRange(0, 4))]
    with pytest.raises(ValueError, match="multi_modal_data: no model of vllmx takes"):
        core.preprocess_add_request(request)
    request = make_engine_request("a", 8)
    request.prompt_embeds = np.zeros((8, 4), np.float32)
    with pytest.raises(ValueError, match="prompt_embeds: no model of vllmx takes"):
        core.preprocess_add_request(request)
    request = make_engine_request("a", 8)
    request.mm_features = []
    assert not core.preprocess_add_request(request)[0].has_encoder_inputs


def test_a_connector_for_encoder_outputs_is_refused_where_there_are_none():
    config = make_config()
    config.ec_transfer_config = ECTransferConfig("ECExampleConnector", ec_role="ec_both")
    with pytest.raises(UserError, match="ec_transfer: the model takes text alone"):
        resolve_scheduler_limits(config)
    config.model_config.mm_max_toks_per_item = {"image": 8}
    resolve_scheduler_limits(config)


class EncoderDecoder(ModelConfig):
    is_encoder_decoder = True


def test_an_encoder_decoder_model_gets_whole_prompts_and_no_shared_prefixes():
    config = make_config(max_num_batched_tokens=None, long_prefill_token_threshold=16)
    config.scheduler_config.max_num_batched_tokens = None
    config.model_config = EncoderDecoder(max_model_len=300)
    resolve_scheduler_limits(config)
    scheduler = config.scheduler_config
    assert not scheduler.enable_chunked_prefill and scheduler.disable_chunked_mm_input
    assert scheduler.long_prefill_token_threshold == 0
    assert scheduler.max_num_batched_tokens == 300
    assert scheduler.max_num_encoder_input_tokens == scheduler.encoder_cache_size == 300
    assert not config.cache_config.enable_prefix_caching
