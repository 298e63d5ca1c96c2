"""Settings: their declarations, and how flags and recipes (YAML files) become values.

arguments         the settings of pretrain.py and sft_train.py: fields, help, defaults
preparation       the settings of prepare_data.py
declarations      name, type and default of a setting; values with sources; unknown names
command_line, recipes    flags and YAML files -> values, each with its source
settings          reads a run's settings: resets overruled ones, derives missing ones, checks all
rules             rules by which one setting makes another ineffective or contradicts it
refusals          checks that refuse settings which cannot work, each with its reason
strategy          the accelerate config of `--strategy`; the GPUs of `--assume`
launch_settings   settings of accelerate that are refused or overruled; the choice of bf16
display           --help and --print_config
errors            exit codes, errors that a user can repair, lists of log lines
"""
