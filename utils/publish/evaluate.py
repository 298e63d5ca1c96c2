r"""Benchmark the finished model of a run with lm-evaluation-harness (`pip install lm_eval`).

    python -m utils.publish.evaluate runs/my-run --tasks hellaswag,arc_easy
    python -m utils.publish.evaluate runs/my-run --tasks gsm8k --limit 100 --apply_chat_template

`lm_eval` runs on final/ in its own process, on one GPU if there is one. All further flags go to
lm_eval. The results are in lm_eval.json in the run's directory. `lm_eval_tasks: [hellaswag]` in a
recipe does the same once final/ is written.
"""

import argparse
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoints.files import FINAL
from utils.config.declarations import LM_EVAL, is_installed
from utils.config.errors import ConfigurationError
from utils.config.launch_settings import LAUNCHER_VARIABLES
from utils.host.atomic_files import replace_text
from utils.host.hub import hub_fault, stay_offline
from utils.host.redaction import load_env_file
from utils.launch.script import configure_logging, run_script
from utils.publish.hub import RESULTS

logger = logging.getLogger(__name__)

# Prefixes of a launcher's environment variables. They would make lm_eval wait for other processes.
LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the run that the command line names; return the exit code."""
    configure_logging()
    load_env_file()
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "evaluate", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a finished run")
    parser.add_argument("--tasks", nargs="+", required=True, help="of lm_eval, by blanks or commas")
    arguments, flags = parser.parse_known_args(argv)
    evaluate(arguments.run, arguments.tasks, flags)
    return 0


def evaluate(run: Path, tasks: Sequence[str], flags: Sequence[str] = ()) -> None:
    """Run lm_eval on a run's final/ and save the results as lm_eval.json in the run directory.

    flags: further flags of lm_eval. lm_eval prints its table to stdout. Raises ConfigurationError
    if lm_eval cannot run or fails.
    """
    if not (run / FINAL).is_dir():
        raise ConfigurationError(f"{run} has no {FINAL}/, which the end of a run writes.")
    if not is_installed("lm_eval"):
        raise ConfigurationError(f"lm_eval is not installed: pip install '{LM_EVAL}'.")
    import torch  # slow, like the imports of lm_eval

    if fault := hub_fault():
        logger.info("benchmarks: %s: the tasks' data come from the Hub's cache", fault)
        stay_offline()
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
    command += ["--model_args", f"pretrained={run / FINAL}", "--tasks", *tasks]
    if torch.cuda.is_available() and not {"--batch_size", "-b"} & set(flags):
        command += ["--batch_size", "auto"]  # lm_eval's default is 1
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    with tempfile.TemporaryDirectory() as folder:
        command += ["--output_path", folder, *flags]
        logger.info("benchmarks: %s", shlex.join(command))
        sys.stdout.flush()
        process = subprocess.run(command, env=environment, check=False)
        result_files = sorted(Path(folder).rglob("results_*.json"))
        if process.returncode or not result_files:
            fetch = ["python", *command[1:4], "--model", "dummy", "--tasks", *tasks, "--limit", "1"]
            raise ConfigurationError(
                f"lm_eval ended with {process.returncode}; its output above says why. Without a "
                "network the tasks' data has to be in the cache (HF_HOME): where there is one, as "
                f"on the login node, `{shlex.join(fetch)}` fetches it, and finds unknown names."
            )
        replace_text(run / RESULTS, result_files[-1].read_text(encoding="utf-8"))
    logger.info("benchmarks: %s has all figures; publishing adds them to the card", run / RESULTS)


if __name__ == "__main__":
    sys.exit(run_script(main))
