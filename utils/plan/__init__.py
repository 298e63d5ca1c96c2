"""The plan of a run, before any weight loads or any file is written.

run_plan                      a pure function of settings, data, model and launch; its log lines
run_data                      the datasets of the run: opened, checked, packed
arithmetic, number_types      steps and micro-batches; types of weights and Adam's states
memory_plan                   bytes by device; the activation checkpointing that fits
remedies                      settings with which a run fits that does not
memory_trace                  a training step counted on the model without data
rehearsal                     one step with the libraries, which judge the settings
forecast, suggestions         speed on GPUs elsewhere; the settings that fit them best
"""
