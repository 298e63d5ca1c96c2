"""The garbage collector rests during a start and works in training."""

import gc

from utils.cluster.garbage import collector_paused, resume_collector


def test_nothing_is_collected_until_the_collector_resumes_or_the_block_ends():
    @collector_paused()
    def start(resume: bool) -> list[bool]:
        seen = [gc.isenabled()]
        if resume:
            resume_collector()
            seen.append(gc.isenabled())
        return seen

    gc.unfreeze()  # what other tests of this process left
    for resume, seen in ((False, [False]), (True, [False, True])):
        try:
            assert gc.get_freeze_count() == 0
            assert start(resume) == seen
            assert gc.isenabled()
            assert gc.get_freeze_count() > 0  # what is there by then is not looked at again
        finally:
            gc.unfreeze()
