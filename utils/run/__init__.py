"""A run, from the first start of the training script to the finished model in final/.

start       sets up the process, locks output_dir, finds the checkpoint to resume from; dry runs
raw_data    tokenizes raw files of train_data before the training, in worker processes
staging     copies the datasets to each node's own disk
preflight   checks before training: equal settings on all ranks, space and rights in output_dir
provenance  provenance.json; a resume with settings that change results is refused
trackers    Weights & Biases, MLflow, TensorBoard, Trackio
finish      creates the callbacks; evaluates and exports at the end of training
export      writes the finished model to final/, and LoRA's adapter to adapter/
documents   status.py --step: the documents of a step, their texts and losses
chat        chat.py: conversations with a finished model or a checkpoint
"""
