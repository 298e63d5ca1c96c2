"""A checkpoint from save to resume.

store      a save: room, Trainer's files, each rank's digests, the manifest last, rotation
staging    saves in the background, through a directory in this node's memory
files      who writes which file, digests, copies, and the manifest that makes it a checkpoint
record     config.yaml and provenance.json, restored from a checkpoint's copies
discovery  the checkpoint to resume from, which stay, free space; damaged ones are set aside
adoption   a checkpoint from elsewhere in a new run directory: --resume_from_checkpoint
pickles    no code in a checkpoint is run
"""
