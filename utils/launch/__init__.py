"""From a Slurm job, or a shell, to ranks that can train, and to the verdict on how they ended.

node                what slurm/launch_node.sh runs per node: checks, `accelerate launch`, verdict
slurm               what Slurm gave the job: nodes, processes, port, the time limit
caches              the job's private directory on the node, and compiled code passed between jobs
rendezvous          first check: the nodes reach each other and are alike
accelerate_command  whether the strategy's config can start the processes; the command it becomes
processes           second check: the ranks form one group, can talk, train as was asked
signals             signals that end jobs become a request to stop
script, verdict     how a process begins and ends, and which end explains the job's
notify              tells a webhook what became of the job
"""
