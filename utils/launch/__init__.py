"""Launch of a run's ranks from a Slurm job or a shell, checks of the ranks, reasons of their end.

node         the launcher of a node: choose the accelerate config, check, run `accelerate launch`
slurm        Slurm's variables: nodes, processes, port, time limit
caches       the job's private directory on the node; the cache of compiled code
rendezvous   first check: the nodes reach each other and have the same code and packages
processes    second check: the ranks are connected and run the requested strategy
signals      Slurm's signals and Ctrl-C as requests to stop
entry        start of every script, without a traceback after Ctrl-C
script       logging, environment variables and exit codes of a training script
opening      output of a script before it imports torch: package versions, first line
restart      restarts of the ranks inside the job after one of them was lost
verdict      files with the reason and exit code of each rank and of the whole job
ledger       the file of faults of nodes; nodes that a requeued job must not use again
notify       messages about the end of a run to a webhook or a command
"""
