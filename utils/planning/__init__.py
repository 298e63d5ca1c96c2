"""What is known of a run before any weight loads or any file is written.

plan                          steps, precision, kernels and memory of a run, logged
run_data                      its datasets: opened, checked, packed
memory_trace, stand_ins       a training step counted on the model without data
memory_estimate, memory_plan  bytes by device; which activations are recomputed
job                           the job the run is to go through, for a dry run
"""
