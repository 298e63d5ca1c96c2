"""Makes FSDP2 and DeepSpeed run on CPU processes (gloo), which accelerate does not offer.

Only for tests. Python imports this file at start if its folder is on PYTHONPATH.
STOKER_TEST_STEP_DELAY_S=0.5 makes each training step longer, so that a test can interrupt a run of
small steps. STOKER_TEST_KILL_RANK_AT_STEP=1:3 kills rank 1 after three steps, in every start of the
run. STOKER_TEST_HOLD=FOLDER holds the ranks after step N while the file FOLDER/N exists.
STOKER_TEST_CLOCK_OFF_S=100 sets the clock of the job's second node ahead. STOKER_TEST_CPU_STRATEGY
is one of:

fsdp2      accelerate runs FSDP only for certain members of DistributedType, all accelerators. This
           makes one of these members mean MULTI_CPU. Needs ACCELERATE_USE_CPU=true.
deepspeed  without a GPU, accelerate finds a backend only if the CPU is requested, and then it runs
           no DeepSpeed. This makes gloo the backend. Needs DS_ACCELERATOR=cpu, no use_cpu.
           DeepSpeed's shared-memory all-reduce takes a minute to compile at the first start. This
           leaves it out, so that gloo reduces.

Checked against accelerate 1.15 (`AcceleratorState.__init__`, `PartialState._prepare_backend`) and
deepspeed 0.19 (`comm/torch.py`, `build_shm_op`).
"""

import importlib.abc
import importlib.machinery
import os
import pathlib
import signal
import sys
import time
import types


def allow_fsdp2(state):
    """Make `DistributedType.MULTI_NEURON` of accelerate.state mean MULTI_CPU."""
    members = {member.name: member for member in state.DistributedType}
    members["MULTI_NEURON"] = state.DistributedType.MULTI_CPU
    state.DistributedType = types.SimpleNamespace(**members)


def allow_deepspeed(state):
    """Always choose gloo on the CPU."""
    backend = ("gloo", state.DistributedType.MULTI_CPU)
    state.PartialState._prepare_backend = lambda *_args, **_kwargs: backend


def compile_nothing(communication):
    """Report that the shared-memory all-reduce is missing."""
    communication.build_shm_op = lambda: None


def disturb_steps(callbacks):
    """Sleep, die or wait at the beginning of a training step, without changing a number."""
    on_step_begin = callbacks.CallbackHandler.on_step_begin
    delay_s = float(os.environ.get("STOKER_TEST_STEP_DELAY_S", "0"))
    victim = os.environ.get("STOKER_TEST_KILL_RANK_AT_STEP", "")
    hold = pathlib.Path(os.environ.get("STOKER_TEST_HOLD", "/dev/null"))

    def disturb_first(handler, args, state, control):
        time.sleep(delay_s)
        if victim == f"{os.environ.get('RANK', '0')}:{state.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)
        while (hold / str(state.global_step)).exists():
            time.sleep(0.05)
        return on_step_begin(handler, args, state, control)

    callbacks.CallbackHandler.on_step_begin = disturb_first


CHANGES = {
    "fsdp2": {"accelerate.state": allow_fsdp2},
    "deepspeed": {"accelerate.state": allow_deepspeed, "deepspeed.comm.torch": compile_nothing},
}


class ChangeAfterImport(importlib.abc.MetaPathFinder):
    """An import hook that applies each change right after its module is imported."""

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


def wanted_changes():
    """Return the changes that the environment asks for, by the module that they change."""
    strategy = os.environ.get("STOKER_TEST_CPU_STRATEGY")
    wanted = dict(CHANGES[strategy]) if strategy else {}
    steps = {"STOKER_TEST_STEP_DELAY_S", "STOKER_TEST_KILL_RANK_AT_STEP", "STOKER_TEST_HOLD"}
    if steps & os.environ.keys():
        wanted["transformers.trainer_callback"] = disturb_steps
    return wanted


def set_clock_ahead(seconds):
    """Set this process's clock ahead by this many seconds."""
    true_time = time.time
    time.time = lambda: true_time() + seconds


if "STOKER_TEST_CLOCK_OFF_S" in os.environ and os.environ.get("SLURM_NODEID") == "1":
    set_clock_ahead(float(os.environ["STOKER_TEST_CLOCK_OFF_S"]))
# The launcher has no RANK yet: it imports no trainer, and needs no change of the strategy.
if wanted := wanted_changes():
    steps = {name: wanted[name] for name in ["transformers.trainer_callback"] if name in wanted}
    sys.meta_path.insert(0, ChangeAfterImport(wanted if "RANK" in os.environ else steps))
