"""The start of a run's ranks from a Slurm job or a shell, checks of them, and why they ended.

node         the launcher of a node: choose the accelerate config, check, run `accelerate launch`
slurm        Slurm's variables: nodes, processes, port, time limit
caches       the job's private directory on the node; the cache of compiled code
rendezvous   first check: the nodes reach each other and have the same code and packages
processes    second check: the ranks are connected and run the requested strategy
signals      Slurm's signals and Ctrl-C as requests to stop
entry        the first import of every script
script       logging, environment variables and exit codes of a training script
opening      what a script says before it imports torch: version, short help, first line
restart      restarts of the ranks inside the job after a lost rank
verdict      files with the reason and exit code of each rank and of the whole job
ledger       faults of nodes, and which nodes a requeued job leaves out
notify       messages about the end of a job to a webhook or a command
"""
