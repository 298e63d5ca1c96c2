"""Records the kernels of a step, and how often its host waited for the device."""

from typing import Any

import torch

# Waiting for the whole device, cudaDeviceSynchronize, is what the recorder does itself.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
MOST = 40
NAME_LENGTH = 160  # of a kernel: templates name theirs in thousands of characters


class KernelTrace:
    """Records what runs between `start` and `stop`: kernels on a GPU, operators on a CPU."""

    def __init__(self) -> None:
        activity = torch.profiler.ProfilerActivity
        self.on_gpu = torch.cuda.is_available()
        # CUDA alone records the runtime's calls too, the waits among them.
        self.recorder = torch.profiler.profile(
            activities=[activity.CUDA if self.on_gpu else activity.CPU]
        )

    def start(self) -> None:
        """Begin to record."""
        self.recorder.start()

    def stop(self) -> dict[str, Any]:
        """Return the kernels that took longest, each [name, share of all their time, calls].

        `kernels_s` is the time of all together: what a step takes beyond it, a GPU was idle.
        """
        self.recorder.stop()
        events = self.recorder.key_averages()
        key = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        times = sorted(((getattr(event, key), event) for event in events), key=lambda one: -one[0])
        total = sum(time for time, _ in times) or 1.0
        return {
            "kernels": [
                [event.key[:NAME_LENGTH], round(time / total, 4), event.count]
                for time, event in times[:MOST]
                if time > 0
            ],
            "kernels_s": round(total / 1e6, 5),
            "waits_for_device": sum(event.count for event in events if event.key in WAITS),
        }
