"""Compare Stoker with other toolkits; write one JSON per cell to benchmarks/results/.

    python -m benchmarks cpu                      all cells for a CPU
    python -m benchmarks cpu --cells pretrain_bf16 --repeats 3
    python -m benchmarks gpu --resume --minutes 9 all cells for one GPU, nine minutes at a time
    python -m benchmarks gpu --toy --results /tmp/toy   rehearse them on any machine

Let nothing else run meanwhile. Baselines run in turn, each in a fresh process.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.cells.cpu import CPU_CELLS
from benchmarks.cells.gpu import GPU_CELLS
from benchmarks.cells.kinds import Cell, ComponentCell, ProbeCell, SweepCell
from benchmarks.cells.toy import toy
from benchmarks.comparisons.turns import BaselineFailedError
from benchmarks.hardware.circumstances import ROOT, hardware
from benchmarks.measure import Session
from benchmarks.progress import OutOfTimeError, say
from utils.launch.script import run_script

RESULTS = ROOT / "benchmarks" / "results"
GROUPS = {"cpu": CPU_CELLS, "gpu": GPU_CELLS}
GROWING = (ComponentCell, SweepCell)
AGAIN = 75  # exit code: the same command resumes, as with the training scripts


def main(argv: list[str] | None = None) -> int:
    """Run the comparisons that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--cells", default="", help="names, separated by commas; default: all")
    parser.add_argument(
        "--without", default="", help="baselines to leave out, separated by semicolons"
    )
    parser.add_argument(
        "--sizes",
        default="",
        help="of cells that grow, separated by commas; default: all of theirs",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument(
        "--resume", action="store_true", help="resume the rounds of this commit and device"
    )
    parser.add_argument(
        "--minutes", type=float, help="begin no round that would end later; exit code 75 then"
    )
    parser.add_argument(
        "--toy", action="store_true", help="toy sizes on any device: a rehearsal, no measurement"
    )
    given = parser.parse_args(argv)
    if given.toy and given.results.resolve() == RESULTS:
        parser.error("--toy measures nothing: give --results a directory of its own")
    if given.toy and given.group != "gpu":
        parser.error("--toy rehearses the group gpu; the others run anywhere as they are")
    if given.group == "gpu" and not given.toy and "gpu" not in hardware():
        parser.error("the group gpu needs an NVIDIA GPU, and nvidia-smi shows none; see --toy")
    cells = {cell.name: toy(cell) if given.toy else cell for cell in GROUPS[given.group]}
    names = [name for name in given.cells.split(",") if name] or list(cells)
    if unknown := [name for name in names if name not in cells]:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(cells)}")
    sizes = tuple(int(size) for size in given.sizes.split(",") if size)
    if sizes and (fixed := [name for name in names if not isinstance(cells[name], GROWING)]):
        parser.error(f"--sizes: nothing grows in {', '.join(fixed)}")
    left_out = tuple(name for name in given.without.split(";") if name)
    session = Session(
        group=given.group,
        left_out=left_out,
        sizes=sizes,
        results=given.results,
        repeats=given.repeats,
        resume=given.resume,
        toy=given.toy,
        deadline=None if given.minutes is None else time.monotonic() + 60 * given.minutes,
    )
    chosen = [sized(cells[name], sizes) for name in names]
    if given.group == "gpu" and not session.device().probed:
        # Other results need them to compute MFU.
        chosen = [ProbeCell(toy=given.toy), *(one for one in chosen if one.name != "probes")]
    return measure(session, chosen)


def sized(cell: Cell, sizes: tuple[int, ...]) -> Cell:
    """Return a cell with other sizes, if there are any."""
    return replace(cell, sizes=sizes) if sizes and isinstance(cell, GROWING) else cell


def measure(session: Session, cells: list[Cell]) -> int:
    """Measure each cell; continue with the others if one fails."""
    failed = []
    for cell in cells:
        say(f"\n{cell.name}")
        try:
            if not session.measure(cell):
                failed.append(
                    f"{cell.name}: the losses do not agree, this is not the same training"
                )
        except OutOfTimeError:
            say("time is up; the same command with --resume continues here")
            return AGAIN
        except BaselineFailedError as error:
            failed.append(f"{cell.name}: Stoker failed: {error}")
            say(failed[-1])
    for line in failed:
        say(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
