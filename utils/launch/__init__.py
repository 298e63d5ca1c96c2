"""Launch of a run's ranks from a Slurm job or a shell, checks and restarts, reports of their end.

node         the launcher of a node: choose the accelerate config, check, run `accelerate launch`
slurm        Slurm's variables: nodes, processes, port, time limit
caches       the job's private directory on the node; the cache of compiled code
rendezvous   first check: the nodes reach each other and have the same code and packages
processes    second check: the ranks are connected and run the requested strategy
signals      requests to stop: Slurm's signals and Ctrl-C
entry        start of every script, without a traceback after Ctrl-C
script       logging, environment variables and exit codes of a training script
opening      output of a script before it imports torch: first line, or package versions
restart      restarts of the ranks inside the job after a rank was lost
verdict      files that say why each rank ended and why the whole job ended, with exit codes
ledger       the file that records faults of nodes; which nodes a requeued job must avoid
notify       messages about the end of a run to a webhook or a command
"""
