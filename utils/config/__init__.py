"""What the user may set, and how a flag or a line of a recipe becomes it.

arguments         the settings of pretrain.py and sft_train.py: fields, help, defaults
preparation       the settings of prepare_data.py
settings          reads a run's settings: overruled, derived, checked, built
rules             settings that have no effect while another has some value
checks            what is refused, with the reason
command_line, recipes    flags and YAML files -> values, each with its source
display           what --help and --print_config show
declarations      name, type and default of a setting; the values of all
unknown_names     refused settings, other toolkits' names, typing errors
strategy, assumed        the accelerate config of a strategy; the GPUs that a dry run assumes
launch_settings          settings of accelerate with which training would be wrong
precision, errors        bf16 that nobody set; exit codes and the errors that users can repair
"""
