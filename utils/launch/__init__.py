"""The launch of a run: from a Slurm job or a shell to connected ranks, and the cause of their end.

node                the launcher of a node: checks, `accelerate launch`, verdict
slurm               Slurm's variables: nodes, processes, port, time limit
caches              the job's private directory on the node; compiled code that jobs share
rendezvous          first check: the nodes reach each other and are alike
accelerate_command  the processes of a script, its accelerate config, the arguments for accelerate
processes           second check: the ranks are connected and run the requested strategy
signals             Slurm's signals as requests to stop
script, verdict     the beginning and end of a script's process; the cause of a job's end
notify              messages about the end of a job to a webhook
"""
