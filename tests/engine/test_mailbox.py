# SPDX-License-Identifier: Apache-2.0
"""What waits for a dead engine is woken up, whatever the callers do meanwhile."""

from concurrent.futures import Future

import pytest

from vllmx.engine.mailbox import SyncMailbox
from vllmx.exceptions import EngineDeadError


class TakenOutMeanwhile(dict):
    """Calls of a thread that takes its call out as soon as somebody has looked at them."""

    def __len__(self):
        seen = super().__len__()
        self.clear()
        return seen

    def __iter__(self):
        seen = list(self.keys())
        self.clear()
        return iter(seen)


def test_caller_that_gives_up_while_the_mailbox_closes_does_not_keep_others_waiting():
    mailbox = SyncMailbox()
    mailbox.calls = TakenOutMeanwhile({1: Future()})
    mailbox.close("its process was killed")
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="killed"):
            mailbox.get()


def test_every_call_is_failed_with_an_error_of_its_own():
    mailbox = SyncMailbox()
    calls = {i: Future() for i in range(3)}
    mailbox.calls = dict(calls)
    mailbox.close("its process was killed")
    errors = [call.exception(timeout=0) for call in calls.values()]
    assert all(isinstance(error, EngineDeadError) for error in errors)
    assert len({id(error) for error in errors}) == 3 and not mailbox.calls
