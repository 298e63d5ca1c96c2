"""Test only: let FSDP2 and DeepSpeed run on CPU processes (gloo), which accelerate does not offer.

Python imports this file at start when its folder is on PYTHONPATH; STOKER_TEST_CPU_STRATEGY says
what to do:

fsdp2      accelerate takes the FSDP branch for accelerators only: give it a DistributedType in
           which one of those members is MULTI_CPU. Needs ACCELERATE_USE_CPU=true.
deepspeed  accelerate finds no backend without a GPU unless asked for the CPU, and asked for the
           CPU it leaves DeepSpeed out: answer gloo. Needs DS_ACCELERATOR=cpu, no use_cpu.
           DeepSpeed compiles a shared-memory all-reduce at the first start (a minute): leave it
           out, gloo does the work.

Checked against accelerate 1.15 (`AcceleratorState.__init__`, `PartialState._prepare_backend`) and
deepspeed 0.19 (`comm/torch.py`, `build_shm_op`).
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types


def allow_fsdp2(state):
    """Make `DistributedType.MULTI_NEURON` of accelerate.state mean MULTI_CPU."""
    members = {member.name: member for member in state.DistributedType}
    members["MULTI_NEURON"] = state.DistributedType.MULTI_CPU
    state.DistributedType = types.SimpleNamespace(**members)


def allow_deepspeed(state):
    """Answer gloo on the CPU whatever was asked."""
    backend = ("gloo", state.DistributedType.MULTI_CPU)
    state.PartialState._prepare_backend = lambda *_args, **_kwargs: backend


def compile_nothing(communication):
    """Answer that the shared-memory all-reduce is not there."""
    communication.build_shm_op = lambda: None


CHANGES = {
    "fsdp2": {"accelerate.state": allow_fsdp2},
    "deepspeed": {"accelerate.state": allow_deepspeed, "deepspeed.comm.torch": compile_nothing},
}


class ChangeAfterImport(importlib.abc.MetaPathFinder):
    """Applies each change right after its module is imported."""

    def __init__(self, changes):
        self.changes = dict(changes)

    def find_spec(self, name, path, target=None):
        change = self.changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change
        return spec


# Only the workers: the launcher has no RANK yet.
if os.environ.get("STOKER_TEST_CPU_STRATEGY") and "RANK" in os.environ:
    sys.meta_path.insert(0, ChangeAfterImport(CHANGES[os.environ["STOKER_TEST_CPU_STRATEGY"]]))
