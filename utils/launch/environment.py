"""The process environment of a run: log lines, offline switches and no telemetry."""

import atexit
import gc
import logging
import os
import sys
import warnings

from utils.launch.slurm import adopt_slurm_tasks
from utils.support.host import global_rank, host_name
from utils.support.redaction import install_redaction

logger = logging.getLogger(__name__)

# Libraries that tell at INFO what helps nobody in a training log.
_NOISY = ("accelerate", "datasets", "deepspeed", "filelock", "fsspec", "httpx", "huggingface_hub")


class LineHandler(logging.StreamHandler):
    """Writes each record to stdout as whole, flushed lines, above a progress bar if one shows."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        # tqdm is only looked at when something else loaded it: no bar can show before that.
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is None or not getattr(tqdm, "_instances", None):
            super().emit(record)
            return
        tqdm.write(self.format(record), file=self.stream)
        self.flush()


class LineFormatter(logging.Formatter):
    """`12:34:56  message`, with the level where it is not INFO and the rank where it is not 0."""

    def __init__(self, rank: int) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.origin = f"{host_name()} rank {rank}  " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Put time, origin and level in front of the message."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname}  "
        return f"{self.formatTime(record, self.datefmt)}  {self.origin}{level}{record.message}"


def configure_logging() -> None:
    """Send log lines to stdout: all of rank 0, of other ranks warnings with their name.

    Secrets are redacted from all of them, and from uncaught errors. Libraries are kept to
    warnings; those of other ranks, which repeat rank 0's, to errors. Safe to call again.
    """
    rank = global_rank()
    install_redaction()
    handler = LineHandler()
    handler.setFormatter(LineFormatter(rank))
    root = logging.getLogger()
    for old in [known for known in root.handlers if isinstance(known, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    library_level = logging.WARNING if rank == 0 else logging.ERROR
    for name in (*_NOISY, "py.warnings"):
        logging.getLogger(name).setLevel(library_level)
    # transformers brings its own handler and reads its level here when it is first imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if rank == 0 else "error")
    logging.captureWarnings(True)
    # Without the source line, which says little and makes two lines of one event.
    warnings.formatwarning = lambda message, category, filename, lineno, *_: (
        f"{category.__name__}: {message} ({filename}:{lineno})"
    )


def configure_environment() -> None:
    """Set the switches that libraries read once, when they are imported.

    Call it before huggingface_hub, transformers or datasets is imported. Telemetry is off (TRL
    reports each trainer to the Hub otherwise), and so are progress bars without a terminal.
    A Slurm job is offline: its nodes seldom have internet and would wait for time-outs. What the
    user set stays: HF_HUB_OFFLINE=0 keeps a job online.

    Ranks that srun started as tasks of its own get their variables first (see `slurm_tasks`).
    Raises ConfigurationError where that cannot work.
    """
    launch = adopt_slurm_tasks(os.environ)
    if launch:
        configure_logging()  # the rank is known from here on
        logger.info("%s", launch)
    # Imports leave 700,000 objects for good: a start is a third shorter if the collector does not
    # go through them a thousand times, nor once more when the process ends.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # The tokenizers library warns, and can deadlock, when data workers are forked after its use.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # oneDNN and torch each keep the code of a thousand shapes, half a megabyte apiece, by default.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
    if not sys.stderr.isatty():
        # Bars redraw one line with carriage returns, which a log file keeps, all of them.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "SLURM_JOB_ID" in os.environ and "HF_HUB_OFFLINE" not in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
        logger.info("Hugging Face Hub: offline (Slurm job); HF_HUB_OFFLINE=0 allows downloads")
