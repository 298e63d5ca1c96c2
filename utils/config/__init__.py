"""Settings: declarations, and values from flags and recipes (YAML files).

arguments         the settings of pretrain.py and sft_train.py: fields, help, defaults
own_code          the user's callbacks and loss, from files of this machine
preparation       the settings of prepare_data.py
raw_data          raw files in train_data, and the prepared datasets that replace them
declarations      name, type and default of each setting; values with their sources
foreign_words     error messages for unknown, misspelled and refused settings
command_line      reads flags and recipes, and reports all faults in one error
recipes           strict YAML files, and `extends`
settings          resets overruled settings of a run, derives missing settings, checks all settings
rules             pairs of settings in which one contradicts the other or switches it off
refusals          checks for settings that cannot work
strategy          the accelerate config of `--strategy`; the GPUs of `--assume`
launch_settings   settings of accelerate that are refused or overruled
precision         defaults of bf16 and activation_checkpointing, which depend on the machine
display           --help and --print_config
errors            exit codes, errors that a user can repair, lists of log lines
"""
