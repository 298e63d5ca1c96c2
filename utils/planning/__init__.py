"""What is known of a run before any weight loads or any file is written.

plan                          steps, precision, kernels, memory and saves of a run, logged
run_data                      its datasets: opened, checked, packed
memory                        bytes by device; which activations are recomputed
remedies                      what makes a run fit that does not
memory_trace                  a training step counted on the model without data
rehearsal                     one step of what the settings name, judged by the libraries
forecast, suggestions         speed on GPUs elsewhere; which settings fit them best
"""
