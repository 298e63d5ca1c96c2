"""The plan of a run, made before any weights load or any file is written.

run_plan           makes the plan from settings, data, model and launch; its log lines
run_data           opens, checks and packs the datasets; divides them into steps
context_parallel   checks that a model can split its sequences over several ranks
rehearsal          takes a step with tiny weights, so that libraries check their settings
memory_trace       counts the memory of a training step on fake tensors
memory_estimate    estimates memory per device, and the bytes of a checkpoint
memory_plan        chooses the activation checkpointing that fits, or advises other settings
ranks              reports groups, weights and samples of three ranks in a dry run for several nodes
forecast           predicts the speed on another machine's GPUs, and the best settings for them
"""
