"""What a job asks of Slurm, as slurm/submit.sh read it before the job is queued.

The dry run that submit.sh starts finds it in STOKER_REQUEST and compares it with the settings.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from utils.config.errors import ConfigurationError

REQUEST = "STOKER_REQUEST"


@dataclass(frozen=True)
class StopSignal:
    """`--signal=B:USR1@300`: which signal, how many seconds before the limit, and to whom.

    `to_batch_shell` is the B: without it Slurm signals the steps, and the job script's trap, which
    passes the signal on to all nodes, never runs.
    """

    name: str
    lead_s: int
    to_batch_shell: bool

    @property
    def stops_the_run(self) -> bool:
        """Whether the scripts in slurm/ answer it with a save."""
        return self.name == "USR1" and self.to_batch_shell


@dataclass(frozen=True)
class JobRequest:
    """The part of an sbatch request that the run depends on.

    `gpus_per_node` is 0 where no GPUs are asked for, `time_limit_s` None where the partition's
    limit counts (or none does), `requeue` None where the cluster decides, `array` None for a job
    that is none. `log` is Slurm's file name pattern. `sources` says where an option was given:
    "--time=30" for the command line, "slurm/train_job.sh:12", or "SBATCH_TIMELIMIT".
    """

    job_script: str
    nodes: int
    gpus_per_node: int
    processes_per_node: int
    tasks_per_node: int
    strategy: str
    strategy_file: str
    time_limit_s: int | None = None
    signal: StopSignal | None = None
    requeue: bool | None = None
    array: tuple[int, ...] | None = None
    job_name: str = ""
    log: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    facts_file: str = ""

    @property
    def processes(self) -> int:
        """The ranks of the run: one a GPU, on all nodes."""
        return self.nodes * self.processes_per_node

    def to_json(self) -> str:
        """Write it for STOKER_REQUEST."""
        return json.dumps(dataclasses.asdict(self))


def request_from(environment: Mapping[str, str]) -> JobRequest | None:
    """Return the request that submit.sh left in the environment; None where it did not start us.

    Raises ConfigurationError when the variable holds something else.
    """
    text = environment.get(REQUEST)
    if not text:
        return None
    try:
        values = json.loads(text)
        signal = values.pop("signal")
        array = values.pop("array")
        return JobRequest(
            **values,
            signal=StopSignal(**signal) if signal else None,
            array=None if array is None else tuple(array),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"{REQUEST} is not a request that slurm/submit.sh wrote ({error}): unset it."
        ) from error
