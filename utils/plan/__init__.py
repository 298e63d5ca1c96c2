"""The plan of a run, made before any weights load or any file is written.

run_plan           makes the plan from settings, data, model and launch; its log lines
run_data           opens, checks and packs the datasets; divides them into steps
context_parallel   the models and launches with which ranks can share sequences
rehearsal          takes a step with tiny weights, so that libraries check the settings
memory_trace       counts the memory of a training step on the model, without data
memory_estimate    memory per device, and the bytes of a checkpoint
memory_plan        the activation checkpointing that fits; changes that would make a run fit
ranks              groups, weights and samples of three ranks of a launch over several nodes
forecast           predicted speed on other machines' GPUs; the best settings for them
"""
