"""Names the place in the code where something happened, in one short phrase."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def place(frames: Sequence[traceback.FrameSummary], packages: Sequence[str] = ()) -> str:
    """Return `file:line in function` of the innermost frame of this repository.

    Frames of the installed `packages` count too. Without any of those the innermost frame of all
    is named. `frames` come as `traceback.extract_tb` gives them, the innermost last.
    """
    for frame in reversed(frames):
        name = _shown_path(frame.filename, packages)
        if name:
            return f"{name}:{frame.lineno} in {frame.name}"
    if not frames:
        return "no Python code"
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def _shown_path(filename: str, packages: Sequence[str]) -> str | None:
    _, installed, name = filename.rpartition("/site-packages/")
    if installed:  # looked at first: the virtual environment may lie in the repository
        return name if name.split("/")[0] in packages else None
    path = Path(filename)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else None


def thread_frames(thread: int) -> list[traceback.FrameSummary]:
    """Return the stack of a thread as it stands, the innermost frame last; no source is read."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return list(reversed(summary))


def waits_for_ranks(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the stack is inside a collective: a call of one, or a backward pass that makes them.

    A rank that only waits for the device shows no frame for it and does not count.
    """
    collectives = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
    return any(name in frame.filename for frame in frames for name in collectives)


def last_line(error: BaseException) -> str:
    """Return `Type: message`, the first line of it, and where in this repository it came from."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{lines[0]} ({place(frames)})" if frames else lines[0]
