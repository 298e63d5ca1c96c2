"""Settings: their declarations, and the way from a flag or a line of a recipe to a value.

arguments         the settings of pretrain.py and sft_train.py: fields, help, defaults
preparation       the settings of prepare_data.py
settings          reads a run's settings: overruled, derived, checked, built
rules             settings that have no effect while another has some value
checks            refusals, each with its reason
command_line, recipes    flags and YAML files -> values, each with its source
display           --help and --print_config
declarations      name, type and default of a setting; the values of all
unknown_names     refused settings, other toolkits' names, typing errors
strategy, assumed        the accelerate config of a strategy; the GPUs that a dry run assumes
launch_settings          settings of accelerate that are refused or named
precision, errors        bf16 that nobody set; exit codes, errors that users can repair, reports
"""
