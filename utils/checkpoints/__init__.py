"""A checkpoint from save to resume.

store      a save: free space, Trainer's files, each rank's digests, the manifest last, rotation;
           in the background through a directory in this node's memory
files      the files of a checkpoint: owners, digests, copies; the manifest that commits it
record     config.yaml and provenance.json, restored from the copies in a checkpoint
discovery  the checkpoint to resume from; rotation; free space; damaged checkpoints
adoption   --resume_from_checkpoint: copies another run directory's checkpoint into a new one
pickles    a safe unpickler: no code in a checkpoint is run
"""
