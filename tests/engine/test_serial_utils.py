# SPDX-License-Identifier: Apache-2.0
"""Messages of the engine survive the way through msgpack, arrays without a copy."""

import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from engine_helpers import make_engine_request

from vllmx.core.output import LogprobsLists
from vllmx.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
    UtilityResult,
)
from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.lora.request import LoRARequest
from vllmx.metrics.stats import KVCacheEvictionEvent, PrefillStats, PrefixCacheStats, SchedulerStats
from vllmx.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams


def through(obj, t=None, **kwargs):
    """`obj` after the way through an encoder and a decoder of type `t`."""
    buffers = MsgpackEncoder(**kwargs).encode(obj)
    return MsgpackDecoder(t, **kwargs).decode([bytes(memoryview(b).cast("B")) for b in buffers])


def test_request_arrives_as_it_was_sent():
    request = make_engine_request(
        "a",
        [1, 2, 3],
        max_tokens=7,
        n=3,
        temperature=0.7,
        seed=5,
        stop=["x", "yz"],
        stop_token_ids=[4],
        logit_bias={3: -1.5, 4: float("-inf")},
        allowed_token_ids=(1, 2),
        bad_words=["no"],
        logprobs=2,
        prompt_logprobs=1,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"k": [1, "two", None]},
        repetition_detection=RepetitionDetectionParams(4, 1, 3),
    )
    request.sampling_params.update_from_generation_config({"eos_token_id": [9, 8]}, 8)
    request.cache_salt, request.priority, request.client_index = "salt", -2, 3
    request.lora_request = LoRARequest("adapter", 1, "here")
    request.trace_headers = {"traceparent": "00"}
    arrived = through(request, EngineCoreRequest)
    assert type(arrived.sampling_params) is SamplingParams
    expected = msgspec.structs.replace(request)
    expected.sampling_params = request.sampling_params.clone()
    expected.sampling_params.allowed_token_ids = [1, 2]
    assert arrived == expected
    assert arrived.sampling_params.all_stop_token_ids == {4, 8, 9}
    # Nothing else than the message itself is sent.
    assert len(MsgpackEncoder().encode(request)) == 1


def test_plain_request_is_short():
    request = make_engine_request("r", [1] * 10)
    assert sum(map(len, MsgpackEncoder().encode(request))) < 150


def test_numbers_of_other_libraries_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        max_tokens=np.int64(4),
        min_p=np.float64(0),
    )
    request = make_engine_request("a")
    request.sampling_params = params
    arrived = through(request, EngineCoreRequest).sampling_params
    assert (arrived.temperature, arrived.top_p, arrived.max_tokens) == (0.5, 0.5, 4)


def logprobs(num_positions, width):
    shape = (num_positions, width)
    return LogprobsLists(
        np.arange(num_positions * width, dtype=np.int32).reshape(shape),
        -np.linspace(0, 9, num_positions * width, dtype=np.float32).reshape(shape),
        np.ones(num_positions, dtype=np.int32),
    )


@pytest.mark.parametrize(("num_positions", "num_buffers"), [(1, 1), (100, 4)])
def test_outputs_arrive_as_they_were_sent(num_positions, num_buffers):
    step = logprobs(num_positions, 3)
    outputs = EngineCoreOutputs(
        engine_index=1,
        outputs=[
            EngineCoreOutput("a", [5], new_logprobs=step, new_prompt_logprobs_tensors=step),
            EngineCoreOutput(
                "b",
                [],
                finish_reason=FinishReason.STOP,
                stop_reason="word",
                events=[EngineCoreEvent(EngineCoreEventType.PREEMPTED, 2.5)],
                prefill_stats=PrefillStats(5, 3, 2, 2, 0),
            ),
        ],
        scheduler_stats=SchedulerStats(
            num_running_reqs=2,
            prefix_cache_stats=PrefixCacheStats(requests=1, queries=5, hits=4),
            kv_cache_eviction_events=[KVCacheEvictionEvent(1.0, 0.5, (0.1, 0.2))],
        ),
        timestamp=3.25,
        finished_requests={"a", "b"},
    )
    # The same array twice is two buffers: what is shared here is not shared there.
    assert len(MsgpackEncoder().encode(outputs)) == 1 + 2 * (num_buffers - 1)
    arrived = through(outputs, EngineCoreOutputs)
    for got in (arrived.outputs[0].new_logprobs, arrived.outputs[0].new_prompt_logprobs_tensors):
        assert isinstance(got, LogprobsLists)
        for ours, theirs in zip(got[:3], step[:3], strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        assert got.cu_num_generated_tokens is None
    for message in (outputs, arrived):
        message.outputs[0].new_logprobs = message.outputs[0].new_prompt_logprobs_tensors = None
    assert arrived == outputs


@dataclass
class Mixed:
    """Arrays of every kind in nested places."""

    small: np.ndarray
    tensors: list[torch.Tensor]
    text: str
    cut: slice


def test_arrays_and_tensors_of_every_shape_and_kind_arrive():
    big = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    tensors = [
        big,
        big.t(),
        big[:, 3:7],
        big[::2].to(torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.nn.Parameter(big),
    ]
    sent = Mixed(np.asfortranarray(np.arange(6.0).reshape(2, 3)), tensors, "é", slice(1, None, 2))
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(Mixed)
    buffers = encoder.encode(sent)
    assert len(buffers) == 1 + 5  # those of 256 bytes and more
    into = bytearray()
    assert encoder.encode_into(sent, into)[0] is into and into == buffers[0]
    for got in (decoder.decode(buffers), through(sent, Mixed)):
        np.testing.assert_array_equal(got.small, sent.small)
        assert (got.text, got.cut) == (sent.text, sent.cut)
        for ours, theirs in zip(got.tensors, tensors, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    zero_dim = through(np.array(3, dtype=np.int16), np.ndarray)
    assert zero_dim.shape == () and zero_dim == 3


def test_large_arrays_are_not_copied_on_either_side():
    array = np.zeros(1000)
    tensor = torch.zeros(1000)
    for obj, t in ((array, np.ndarray), (tensor, torch.Tensor)):
        _, buffer = MsgpackEncoder().encode(obj)
        assert np.shares_memory(np.asarray(buffer), np.asarray(obj))
        writable = bytearray(memoryview(buffer).cast("B"))
        main = MsgpackEncoder().encode(obj)[0]
        shared = MsgpackDecoder(t).decode([main, writable])
        copied = MsgpackDecoder(t, share_mem=False).decode([main, writable])
        writable[:8] = np.float64(1).tobytes()
        assert np.asarray(shared).any() and not np.asarray(copied).any()


class Custom:
    """No form in msgpack."""


def test_what_has_no_form_is_refused_by_name_unless_pickle_is_allowed():
    with pytest.raises(TypeError, match=r"test_serial_utils\.Custom cannot be sent.*insecure"):
        MsgpackEncoder().encode([Custom()])
    with pytest.raises(TypeError, match=r"function.* cannot be sent"):
        MsgpackEncoder().encode(("collective_rpc", sum_of))
    buffers = MsgpackEncoder(allow_pickle=True).encode([np.sum, {"a": Fraction(1, 3)}])
    with pytest.raises(ValueError, match="extension of type 1"):
        MsgpackDecoder().decode(buffers)
    assert MsgpackDecoder(allow_pickle=True).decode(buffers)[0] is np.sum


def sum_of(a, b):
    return a + b


def answer(result, **kwargs):
    output = EngineCoreOutputs(utility_output=UtilityOutput(3, None, UtilityResult(result)))
    return through(output, EngineCoreOutputs, **kwargs).utility_output.result.result


def test_results_of_utility_calls_are_plain_values_or_keep_their_types():
    plain = {"a": [1, None, "x", True], "b": {"c": 2.5}}
    assert answer(plain) == plain
    assert answer(None) is None
    stats = PrefillStats(5, 3, 2, 2, 0)
    assert answer([stats])[0]["num_prompt_tokens"] == 5
    nested = {"outer": [{"inner": [stats, None]}, {"inner": [stats]}], "n": 1, "t": (1, 2)}
    assert answer(nested, allow_pickle=True) == nested
    array = answer(np.arange(500), allow_pickle=True)
    assert isinstance(array, np.ndarray) and array[499] == 499
    typed = MsgpackEncoder(allow_pickle=True).encode(
        EngineCoreOutputs(utility_output=UtilityOutput(3, None, UtilityResult(stats)))
    )
    with pytest.raises(msgspec.ValidationError, match="type of its own"):
        MsgpackDecoder(EngineCoreOutputs).decode(typed)


def test_a_process_without_torch_stays_without_it():
    code = (
        "import sys, vllmx.engine.mp_client, vllmx.engine.core_proc\n"
        "from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder\n"
        "import numpy as np\n"
        "data = MsgpackEncoder().encode(np.arange(999))\n"
        "assert MsgpackDecoder(np.ndarray).decode(data)[998] == 998\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
