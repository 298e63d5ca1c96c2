"""The start of a run's ranks from a Slurm job or a shell, checks of them, and why they ended.

node         the launcher of a node: choose the accelerate config, check, run `accelerate launch`
slurm        Slurm's variables: nodes, processes, port, time limit
caches       the job's private directory on the node; the cache of compiled code
rendezvous   first check: the nodes reach each other and have the same code and packages
processes    second check: the ranks are connected and run the requested strategy
signals      Slurm's signals and Ctrl-C as requests to stop
script       logging, environment variables and exit codes of a training script
opening      the first import of every script: Ctrl-C, version, short help, first line
verdict      files with the reason and exit code of each rank and of the whole job; restarts after a
             lost rank
ledger       faults of nodes, and which nodes a requeued job leaves out
notify       report and message at the end of a run without a job script
"""
