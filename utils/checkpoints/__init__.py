"""Checkpoints from save to resume.

store      saves: free space, Trainer's files, each rank's digests, the manifest, deletion of old
           checkpoints; background saves go through /dev/shm
files      the files of a checkpoint: the rank that writes each, digests, copies, the manifest
record     config.yaml and provenance.json of a run, and the copies in each checkpoint
discovery  the checkpoint to resume from; damaged checkpoints; deletion of old ones; free space
adoption   --resume_from_checkpoint: copies another run's checkpoint into a new run directory
pickles    safe loading of checkpoints: no code in their pickles is run
"""
