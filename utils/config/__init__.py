"""Settings: their declarations, and the way from a flag or a line of a recipe to a value.

arguments         the settings of pretrain.py and sft_train.py: fields, help, defaults
preparation       the settings of prepare_data.py
settings          reads a run's settings: resets overruled ones, derives missing ones, checks all
rules             rules by which one setting makes another ineffective or contradicts it
checks            checks that refuse settings which cannot work, each with its reason
command_line, recipes    flags and YAML files -> values, each with its source
display           --help and --print_config
declarations      name, type and default of a setting; all values with their sources
unknown_names     answers to refused settings, other toolkits' names and typing errors
strategy, assumed        the accelerate config of a strategy; the GPUs that a dry run assumes
launch_settings          settings of accelerate that are refused or overruled
precision, errors        the choice of bf16 if nobody set it; exit codes, users' errors, reports
"""
