"""A run, from the first start of the training script to the finished model in final/.

start       sets up the process, locks output_dir or checks it in a dry run, finds the checkpoint
raw_data    tokenizes raw files of train_data before the training, in worker processes
staging     copies the datasets to each node's own disk
preflight   checks before training: equal settings on all ranks, space and permissions in output_dir
provenance  records each start in provenance.json, refuses changes that alter results
trackers    sets up Weights & Biases, MLflow, TensorBoard and Trackio
finish      creates the callbacks; evaluates and exports at the end of training
export      writes the finished model to final/, and LoRA's adapter to adapter/
documents   lists the documents of a step with texts and losses (status.py --step)
chat        holds conversations with a finished model or a checkpoint (chat.py)
"""
