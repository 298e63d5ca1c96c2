"""A checkpoint from save to resume.

store      a save: room, Trainer's files, each rank's digests, the manifest last, rotation
staging    saves in the background, through a directory in this node's memory
files      who writes which file, digests, copies, flushes
manifest   the file that makes a directory a checkpoint
space      free bytes, and which checkpoints stay
discovery  the checkpoint to resume from; what is damaged or incomplete is set aside
pickles    no code in a checkpoint is run
"""
