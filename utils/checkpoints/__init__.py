"""Checkpoints from save to resume.

store      saves: free space, Trainer's files, each rank's digests, the manifest, rotation;
           background saves go through /dev/shm
files      the files of a checkpoint: owners, digests, copies, and the manifest
record     config.yaml and provenance.json of a run, and the copies in each checkpoint
discovery  the checkpoint to resume from; rotation; free space; damaged checkpoints
adoption   --resume_from_checkpoint: copies another run's checkpoint into a new run directory
pickles    a safe unpickler that runs no code in a checkpoint
"""
