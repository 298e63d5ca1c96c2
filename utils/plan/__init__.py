"""The plan of a run, before any weight loads or any file is written.

run_plan                      makes the plan from settings, data, model and launch; its log lines
run_data                      opens, checks and packs the datasets of the run
arithmetic, number_types      steps and micro-batches; types of weights and Adam's states
memory_plan                   memory per device; the activation checkpointing that fits
remedies                      changes that would make a run fit that needs too much memory
memory_trace                  counts the memory of a training step on the model, without data
rehearsal                     takes a step with tiny weights: the libraries check the settings
forecast, suggestions         predicted speed on other machines' GPUs; the best settings for them
"""
