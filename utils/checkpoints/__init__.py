"""Checkpoints of a run: saving, verification, choice for a resume, deletion.

store      saves a checkpoint: frees space, lets Trainer write the files, writes the manifest;
           for a background save, Trainer writes into /dev/shm and a thread copies the files
files      the files of a checkpoint: the rank that writes each file, digests, the manifest
record     config.yaml and provenance.json of a run, and their copies in each checkpoint
discovery  the checkpoint to resume from; damaged checkpoints; deletion of old ones; free space
adoption   --resume_from_checkpoint: copies another run's checkpoint into a new run directory
pickles    safe loading: no code in a checkpoint's pickles is run
"""
