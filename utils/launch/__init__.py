"""The launch of a run: from a Slurm job or a shell to connected ranks, and the cause of their end.

node         the launcher of a node: its plan, the checks, `accelerate launch`, the end
slurm        Slurm's variables: nodes, processes, port, time limit
caches       the job's private directory on the node; compiled code that jobs share
rendezvous   first check: the nodes reach each other and are alike
processes    second check: the ranks are connected and run the requested strategy
signals      Slurm's signals as requests to stop
script       the beginning and the end of a script's process
verdict      notes on the ends of ranks, and the cause of a job's end
notify       messages about the end of a job to a webhook
"""
