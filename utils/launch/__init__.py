"""From a Slurm job, or a shell, to ranks that can train, and to the word on how they ended.

node                what slurm/launch_node.sh runs per node: checks, `accelerate launch`, verdict
slurm               what Slurm gave the job: nodes, processes, ports, the time limit
rendezvous          first check: the nodes reach each other and are alike
accelerate_command  the strategy's config file and the command it becomes
environment         log lines and the switches that libraries read when imported
processes           second check: the ranks form one group, can talk, train as was asked
signals             signals that end jobs become a request to stop
script, verdict     how a process ends (exit code, note), and which one's end explains the job's
compile_cache       what torch compiled, handed from job to job
"""
