"""A profile of the steps in `profile_steps`: a trace, and a table of the most expensive kernels."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from utils.host.atomic_files import replace_text

logger = logging.getLogger(__name__)

OPERATION_ROWS = 10
NAME_LENGTH = 90  # characters of a kernel's name; names of C++ templates have thousands


class ProfilerWindow(TrainerCallback):
    """A profiler of steps `first` to `stop` - 1 on rank 0. Its files are in `output_dir`/profile.

    Each step has a label in the trace. The table of kernels includes evaluations and saves between
    these steps, and the table's heading lists them. If torch's profiler fails, the run logs a
    warning and continues.
    """

    def __init__(self, first: int, stop: int, output_dir: Path):
        self.first, self.stop, self.directory = first, stop, output_dir / "profile"
        self.profiler: Any = None
        self.mark: Any = None  # the record_function that labels the current step in the trace
        self.remarks = ""  # end of the table's heading

    @override
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Leave out steps that were trained before a resume. Log if no step to profile is left."""
        self.device, begun = args.device, state.global_step + 1
        self.first = max(self.first, begun)
        self.records = state.is_world_process_zero
        if self.first >= self.stop:
            logger.info("profile: none, this start begins after step %d", begun - 1)
            self.stop = 0
        elif self.first == begun:
            self.remarks = "; the first step of a start compiles and allocates, choose later ones"

    @override
    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Start the profiler before step `first`. Begin each profiled step's label in the trace."""
        step = state.global_step + 1
        if not self.records or not self.first <= step < self.stop:
            return
        try:
            if self.profiler is None:
                self._wait()
                on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
                profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_gpu])
                profiler.start()
                self.profiler = profiler
            self.mark = torch.profiler.record_function(f"step {step}")
            self.mark.__enter__()
        except RuntimeError as error:  # CUPTI gives no permission, or another profiler uses it
            logger.warning("profile: torch's profiler does not run here: %s", error)
            self.records = False

    @override
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """End the step's trace label. Write trace and table after the last step or at a stop."""
        done = state.global_step
        if self.mark is not None:
            self.mark.__exit__(None, None, None)
            self.mark = None
        if control.should_training_stop or done == self.stop - 1:
            self._finish(done)
        elif self.profiler is not None:
            asked = {"an evaluation": control.should_evaluate, "a save": control.should_save}
            if due := " and ".join(name for name, is_due in asked.items() if is_due):
                self.remarks += f"; with {due} after step {done}"

    @override
    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write trace and table of the steps so far if the run ends before step `stop` - 1."""
        self._finish(state.global_step)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _finish(self, last: int) -> None:
        """Write trace and table of the steps up to `last` on rank 0.

        On CPUs, all ranks must call this.
        """
        if not self.first <= last < self.stop:
            return
        profiler, self.profiler, self.stop = self.profiler, None, 0
        if self.device.type == "cpu" and torch.distributed.is_initialized():
            # gloo's threads may still write to the profiler's events after DDP has the gradients,
            # and profiler.stop() frees these events. The barrier waits for all earlier work.
            torch.distributed.barrier()
        if profiler is None:
            return
        self._wait()
        trace = self.directory / f"steps{self.first}-{last}-rank0.json.gz"
        try:
            profiler.stop()
            self.directory.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            kind = DeviceType.CUDA if self.device.type == "cuda" else DeviceType.CPU
            averages = profiler.key_averages()
            # Leave out labels such as "step 5": they last longer than any kernel.
            averages[:] = [
                one for one in averages if one.device_type == kind and not one.is_user_annotation
            ]
            if not averages:
                raise RuntimeError("the trace has no kernel: has the user access to CUPTI?")
            table = averages.table(
                sort_by=f"self_{self.device.type}_time_total", row_limit=OPERATION_ROWS,
                max_name_column_width=NAME_LENGTH,
            )  # fmt: skip
            head = f"steps {self.first} to {last} of rank 0{self.remarks}"
            replace_text(self.directory / "kernels.txt", f"{head}\n{table}")
        except (RuntimeError, OSError) as error:
            logger.warning("profile: no table of kernels: %s", error)
            return
        logger.info("profile: %s (ui.perfetto.dev opens it), kernels.txt beside it", trace)
        logger.info("profile: %s", head)
