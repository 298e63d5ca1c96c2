"""The plan of a run, made before any weights load or any file is written.

run_plan           makes the plan from settings, data, model and launch; its log lines
run_data           opens, checks and packs the datasets; divides them into steps
context_parallel   checks that ranks can share the sequences of a model
rehearsal          takes a step with tiny weights, so that libraries check the settings
memory_trace       counts the memory of a training step on fake tensors
memory_estimate    memory per device, and the bytes of a checkpoint
memory_plan        the activation checkpointing that fits; changes that would make a run fit
ranks              shows groups, weights and samples of three ranks, in a dry run for several nodes
forecast           predicted speed on other machines' GPUs; the best settings for them
"""
