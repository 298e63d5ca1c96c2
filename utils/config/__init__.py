"""Settings: their declarations, and the way from a flag or a line of a recipe to a value.

arguments         the settings of pretrain.py and sft_train.py: fields, help, defaults
preparation       the settings of prepare_data.py
declarations      name, type and default of a setting; values with sources; unknown names
command_line, recipes    flags and YAML files -> values, each with its source
settings          reads a run's settings: resets overruled ones, derives missing ones, checks all
rules             rules by which one setting makes another ineffective or contradicts it
refusals          checks that refuse settings which cannot work, each with its reason
strategy          the accelerate config of a strategy; the GPUs that a dry run assumes
launch_settings   settings of accelerate that are refused or overruled; the choice of bf16
display           --help and --print_config
errors            exit codes, users' errors, reports
"""
